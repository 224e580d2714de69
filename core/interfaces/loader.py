"""A weight loader: the tensors of a checkpoint by name. Only `LazyTensor.read` reads weights. Knows no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .model import Model
    from .setup import LoaderSetup

#: Takes (tensor, read) pairs and copies what each `read` returns into its tensor.
Fill: TypeAlias = Callable[[Iterable[tuple[Tensor, Callable[[], Tensor]]]], None]


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

    def restore(self, model: Model, fill: Fill) -> int | None:
        """Fills `model` by `fill` with its parameters as they were once loaded, and returns their bytes.

        None: it reads checkpoints. Raises `ValueError` where they were stored for another `model.share`.
        """
        del model, fill
        return None

    def store(self, model: Model, source: WeightLoader, *, pattern: str = "", max_size: int = 0) -> None:
        """Stores for `restore` what this rank holds of `model`, whose checkpoint `source` reads."""
        raise NotImplementedError(f"{type(self).__name__} stores no weights")

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
