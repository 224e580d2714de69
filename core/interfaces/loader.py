"""A weight loader: named tensors of a checkpoint, read lazily. Knows no model.

`LazyTensor.read` is the only call that touches bytes, and it reads only the rows asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
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
        """The slice `index` (all of it when empty) as a CPU tensor that may alias the file: copy before writing."""


class WeightLoader(ABC):
    """Built as `Class(setup, options)`; chosen by `--load-format`."""

    def __init__(self, setup: LoaderSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.folder: Path = setup.folder

    @abstractmethod
    def supports(self, folder: Path) -> str | None:
        """None, or the reason why `folder` cannot be read by this loader."""

    @abstractmethod
    def tensors(self) -> Iterator[LazyTensor]:
        """Every tensor of the checkpoint once, in file order. Raises `ValueError` naming a corrupt file."""

    @property
    def complete(self) -> bool:
        """Whether every parameter must be covered (False for loaders that fill in values themselves)."""
        return True

    def fill(self, name: str, parameter: Tensor) -> None:
        """Called for parameters that `tensors` did not cover when `complete` is False."""
        raise NotImplementedError(f"{type(self).__name__} does not fill parameters")


def fill_each(pieces: Iterable[tuple[Tensor, Callable[[], Tensor]]]) -> None:
    """Copies what each function reads into its tensor, one after the other: `Streams.fill` without a device."""
    for target, read in pieces:
        target.copy_(read())
