"""Fills the slots of layers from a loader: with tensors that it has, or with values that it makes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from ..interfaces.loader import Fill as Fill, LazyTensor, WeightLoader
from .weight_slot import WeightSlot


@dataclass(frozen=True)
class Piece:
    """A slot to fill, the tensor for it if the checkpoint has one, and the type in which it arrives."""

    slot: WeightSlot
    tensor: LazyTensor | None
    dtype: torch.dtype


class Filling:
    """Fills slots from a loader, and counts the bytes that it reads."""

    def __init__(self, loader: WeightLoader, fill: Fill) -> None:
        self._loader, self._fill = loader, fill
        self.num_bytes = 0

    def run(self, pieces: Sequence[Piece]) -> None:
        """Copies what is copied as it is, then hands over the pieces to `take`, no more at once than the largest."""
        self._copy([(piece, piece.slot.place(piece.dtype)) for piece in pieces if piece.slot.take is None])
        taken = [(piece, _size(piece)) for piece in pieces if piece.slot.take is not None]
        most, held = max((size for _, size in taken), default=0), 0
        some: list[Piece] = []
        for piece, size in taken:
            if held + size > most:
                self._hand_over(some)
                some, held = [], 0
            some.append(piece)
            held += size
        self._hand_over(some)

    def _hand_over(self, pieces: Sequence[Piece]) -> None:
        placed = [(piece, piece.slot.place(piece.dtype)) for piece in pieces]
        self._copy(placed)
        for piece, place in placed:
            piece.slot.write(place)

    def _copy(self, placed: Sequence[tuple[Piece, Tensor]]) -> None:
        reads: list[tuple[Tensor, Callable[[], Tensor]]] = []
        for piece, place in placed:
            if piece.tensor is not None:
                reads.append((place, partial(piece.tensor.read, piece.slot.index)))
                self.num_bytes += place.numel() * piece.dtype.itemsize
        if reads:
            self._fill(reads)
        for piece, place in placed:
            if piece.tensor is None:  # of one of many experts, behind an axis of one
                slot = piece.slot
                part = place.flatten(0, place.dim() - len(slot.shape)) if slot.shape else place
                near = {} if slot.near is None else {"near": slot.near}
                self._loader.fill(slot.name, part, slot.shape, slot.index, **near)


def _size(piece: Piece) -> int:
    """Bytes of what `take` is given."""
    shape, index = piece.slot.shape, piece.slot.index
    taken = (len(range(size)[places]) for size, places in zip(shape, index, strict=False))
    return prod((*taken, *shape[len(index) :])) * piece.dtype.itemsize
