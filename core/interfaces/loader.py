"""A weight loader: the tensors of a checkpoint by name. Only `LazyTensor.read` reads weights. Knows no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .setup import LoaderSetup


class LazyTensor(ABC):
    """One tensor of a checkpoint that has not been read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        """Reads the slice `index` (() for all) to a CPU tensor, which may alias the file: copy before writing."""


class WeightLoader(ABC):
    """Built as `Class(setup, options)`; chosen by `--load-format`."""

    def __init__(self, setup: LoaderSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.folder: Path = setup.folder

    @abstractmethod
    def supports(self, folder: Path) -> str | None:
        """None when this loader can read `folder`, else why not. Reads no weight."""

    @abstractmethod
    def tensors(self) -> Iterator[LazyTensor]:
        """Yields every tensor once, in the order of files. Raises `ValueError` naming a corrupt file."""

    def state(self, share: Mapping[str, Any]) -> Iterator[LazyTensor] | None:
        """The parameters of one rank as they are once loaded, by their names in the model; None where there are none.

        `share` says of which rank, and on what the state depends; raises `ValueError` where it was stored for another.
        """
        del share

    def write(
        self, source: WeightLoader, share: Mapping[str, Any], state: Mapping[str, Tensor], **options: Any
    ) -> None:
        """Stores this rank's `state` in the folder, so that `state` finds it; `source` read the checkpoint."""
        raise NotImplementedError(f"{type(self).__name__} stores no state")

    @property
    def complete(self) -> bool:
        """Whether the checkpoint must have a tensor for every parameter; False for loaders that `fill` the others."""
        return True

    def fill(
        self,
        name: str,
        part: Tensor,
        shape: Sequence[int],
        index: tuple[slice, ...] = (),
        near: tuple[float, float] | None = None,
    ) -> None:
        """Sets `part`, the slice `index` (() for all) of the tensor `name` of `shape`, which `tensors` did not yield.

        Called only if `complete` is False. Each rank asks for what it holds: an element must not depend on the slice.
        `near` is (center, reach) of its values, where the layer knows; a `part` of integers without it may hold any.
        """
        raise NotImplementedError(f"{type(self).__name__} does not fill {name} {list(shape)}")


def fill_each(pieces: Iterable[tuple[Tensor, Callable[[], Tensor]]]) -> None:
    """Copies the tensor that each function reads into the one beside it, one pair after the other."""
    for target, read in pieces:
        target.copy_(read())
