"""Pinned bytes of a layer's weights, in pieces, as pinned memory is rounded up to powers of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: Bytes of the largest piece, and of the smallest.
MOST_BYTES, LEAST_BYTES = 256 << 20, 1 << 20


def piece_sizes(num_bytes: int) -> list[int]:
    """Powers of two whose sum is at least `num_bytes`, by less than the smallest piece."""
    whole, rest = divmod(-(-num_bytes // LEAST_BYTES) * LEAST_BYTES, MOST_BYTES)
    sizes = [MOST_BYTES] * whole
    while rest:
        size = 1 << (rest.bit_length() - 1)
        sizes.append(size)
        rest -= size
    return sizes


class HostBytes:
    """At least `num_bytes` of host memory; `pinned(n)` gives n of them, uint8 [n]."""

    def __init__(self, num_bytes: int, pinned: Callable[[int], Tensor]) -> None:
        self._pieces = [pinned(size) for size in piece_sizes(num_bytes)]
        self.num_bytes = sum(len(piece) for piece in self._pieces)

    def copy_to(self, target: Tensor, start: int, stop: int) -> None:
        """Bytes `start` to `stop` to the same places of `target`, uint8 on the device, without waiting."""
        for place, piece in self._runs(start, stop):
            target[place : place + len(piece)].copy_(piece, non_blocking=True)

    def copy_from(self, source: Tensor, start: int, stop: int) -> None:
        """The same bytes from `source`; they are there when this returns."""
        for place, piece in self._runs(start, stop):
            piece.copy_(source[place : place + len(piece)])

    def put(self, start: int, tensor: Tensor) -> None:
        """The bytes of `tensor` from `start` on; they are there when this returns."""
        given = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for place, piece in self._runs(start, start + len(given)):
            piece.copy_(given[place - start : place - start + len(piece)])

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(the first byte, the memory) of each piece's part of the bytes `start` to `stop`."""
        first = 0
        for piece in self._pieces:
            low, high = max(start, first), min(stop, first + len(piece))
            if low < high:
                yield low, piece[low - first : high - first]
            first += len(piece)
