"""Copies between the blocks of all layers and rows in which a stored block's layers lie side by side.

One launch where the device has a kernel for it, else some for each layer. Knows neither host memory nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import Streams

from .messages import Move
from .pieces import copy_pieces, has_kernel
from .step_worker import CHECKED, Part

_LEAST_BYTES = 16


@dataclass(frozen=True)
class GroupPlaces:
    """Where layers of KV group `number` keep blocks, `count` of which a row has; arrays int64 by layer.

    `caches` are addresses, `strides` bytes between blocks, `sizes` those of a block, `starts` where a row has them.
    """

    number: int
    count: int
    caches: np.ndarray
    strides: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Places:
    """All layers, and those whose values are looked at by their type; None: by none."""

    all: list[GroupPlaces]
    by_type: dict[torch.dtype | None, list[GroupPlaces]]


class LayerCopies:
    """`rows` are uint8 [n, bytes of a stored block] on the device; row i is of the i-th of the moves given with it."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams = streams
        self._device = device
        self._kernel = has_kernel(device)
        self._parts: Sequence[Part] = ()  # which `_places` are of, by the address of rows and the bytes between them
        self._places: dict[tuple[int, int], Places | None] = {}

    def compile(self, parts: Sequence[Part], rows: Tensor) -> None:
        """Has the kernel compiled before a step needs it: copies the first bytes of `rows` to themselves."""
        if self._kernel and rows.numel() >= _LEAST_BYTES:
            table = np.array([[rows.data_ptr(), rows.data_ptr(), _LEAST_BYTES, 0]], np.int64)
            finite = torch.ones(1, dtype=torch.bool, device=self._device)
            for dtype in {None, *_by_type(parts)}:
                copy_pieces(table, self._device, finite=finite if dtype else None, dtype=dtype)

    def _places_of(self, parts: Sequence[Part], rows: Tensor) -> Places | None:
        """For the kernel; None where it cannot copy. Made once for a buffer of rows, as that takes long."""
        if not self._kernel:
            return None
        if self._parts is not parts:
            self._parts, self._places = parts, {}
        key = rows.data_ptr(), rows.stride(0)
        if key not in self._places:
            by_type = {dtype: _group_places(some) for dtype, some in _by_type(parts).items()}
            self._places[key] = Places(_group_places(parts), by_type) if _suits(parts, rows) else None
        return self._places[key]

    def gather(self, parts: Sequence[Part], moves: Sequence[Move], rows: Tensor) -> Tensor:
        """Copies blocks to `rows`; returns bool [n] on the device: which rows hold finite values only.

        Values that are not finite fail the request that made them; they must not fail later ones.
        """
        good = torch.ones(len(moves), dtype=torch.bool, device=self._device)
        if (known := self._places_of(parts, rows)) is not None:
            for dtype, groups in known.by_type.items():
                table = _table(groups, moves, rows, loads=False)
                copy_pieces(table, self._device, finite=good if dtype else None, dtype=dtype)
            return good
        staged: dict[int, Tensor] = {}  # by KV group, whose layers have the same blocks
        for part in parts:
            if part.group not in staged:
                staged[part.group] = self._streams.stage(_blocks(part, moves).reshape(-1))
            found = part.cache.index_select(0, staged[part.group]).view(len(moves), -1)
            if part.dtype in CHECKED:
                good &= found.view(part.dtype).to(CHECKED[part.dtype]).isfinite().all(1)
            rows[:, part.start : part.end] = found
        return good

    def scatter(self, parts: Sequence[Part], moves: Sequence[Move], rows: Tensor) -> None:
        """Copies `rows` to blocks; block 0 is none."""
        if (known := self._places_of(parts, rows)) is not None:
            copy_pieces(_table(known.all, moves, rows, loads=True), self._device)
            return
        staged: dict[int, tuple[Tensor, ...]] = {}  # by KV group: places in the rows, and the blocks there
        for part in parts:
            if part.group not in staged:
                numbers = _blocks(part, moves).reshape(-1)
                needed = np.flatnonzero(numbers)
                staged[part.group] = self._streams.stage(np.stack([needed, numbers[needed]])).unbind(0)
            places, blocks = staged[part.group]
            if len(blocks):
                found = rows[:, part.start : part.end].reshape(-1, part.cache.shape[1])
                part.cache.index_copy_(0, blocks, found.index_select(0, places))


def _blocks(part: Part, moves: Sequence[Move]) -> np.ndarray:
    """int64 [moves, blocks of the part's group in each]."""
    return np.array([move.blocks[part.group] for move in moves], np.int64).reshape(len(moves), part.count)


def _table(groups: Sequence[GroupPlaces], moves: Sequence[Move], rows: Tensor, *, loads: bool) -> np.ndarray:
    """Of the kernel: from `rows` where that `loads`, else to them; a row owns what is copied to it."""
    tables = []
    row = np.arange(len(moves))[:, None]
    for group in groups:
        numbers = np.array([move.blocks[group.number] for move in moves], np.int64).reshape(len(moves), group.count)
        table = np.empty((len(group.caches), *numbers.shape, 4), np.int64)  # by layer, move and block
        sizes = group.sizes[:, None, None]
        ours, theirs = (1, 0) if loads else (0, 1)
        table[..., ours] = group.caches[:, None, None] + group.strides[:, None, None] * numbers
        table[..., theirs] = rows.data_ptr() + row * rows.stride(0) + group.starts[:, None, None]
        table[..., theirs] += np.arange(group.count) * sizes
        table[..., 2], table[..., 3] = sizes, row
        tables.append(table[:, numbers != 0].reshape(-1, 4) if loads else table.reshape(-1, 4))
    return np.concatenate(tables) if tables else np.empty((0, 4), np.int64)


def _group_places(parts: Sequence[Part]) -> list[GroupPlaces]:
    numbers = dict.fromkeys((part.group, part.count) for part in parts)
    return [
        GroupPlaces(number, count, *np.array(found, np.int64).T)
        for number, count in numbers
        if (
            found := [
                (part.cache.data_ptr(), part.cache.stride(0), part.cache.shape[1], part.start)
                for part in parts
                if (part.group, part.count) == (number, count)
            ]
        )
    ]


def _by_type(parts: Sequence[Part]) -> dict[torch.dtype | None, list[Part]]:
    """The parts by the type whose values are looked at; None: by none."""
    found: dict[torch.dtype | None, list[Part]] = {}
    for part in parts:
        found.setdefault(part.dtype if part.dtype in CHECKED else None, []).append(part)
    return found


def _suits(parts: Sequence[Part], rows: Tensor) -> bool:
    """Whether each value is at an address that its size divides."""
    sizes = (
        (
            part.dtype.itemsize,
            rows.data_ptr() | rows.stride(0) | part.start | part.cache.stride(0) | part.cache.shape[1],
        )
        for part in parts
    )
    return all(number % size == 0 for size, number in sizes)
