"""Numbers that several API processes count together, in a file in memory that their parent opened.

Each process owns a row of float64 cells in it, so that counting is a plain addition. A process that takes the row of a
dead one continues its counts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

#: Most processes that share a file.
MAX_ROWS = 256
_BYTES = 8


class Tallies:
    """`size` cells of this process, the last `num_gauges` of which are reset to 0 when a process takes the row.

    `file` is the descriptor of the file, which must stay open; without one the cells are not shared. Raises `OSError`
    when every row is taken.
    """

    def __init__(self, size: int, num_gauges: int, file: int | None = None) -> None:
        self._size = size
        memory: bytearray | mmap.mmap = bytearray(size * _BYTES)
        row = 0
        if file is not None:
            row = _claim_row(file)
            if os.fstat(file).st_size < MAX_ROWS * size * _BYTES:
                os.ftruncate(file, MAX_ROWS * size * _BYTES)
            memory = mmap.mmap(file, MAX_ROWS * size * _BYTES)
        self._memory = memory
        self.cells: memoryview[float] = memoryview(memory).cast("d")[row * size : (row + 1) * size]
        for index in range(size - num_gauges, size):
            self.cells[index] = 0.0

    def total(self) -> list[float]:
        """Every cell, summed over the processes."""
        sums: list[float] = np.frombuffer(self._memory).reshape(-1, self._size).sum(axis=0).tolist()
        return sums


def _claim_row(file: int) -> int:
    """The first row that no running process holds; the lock is released when this process ends."""
    for row in range(MAX_ROWS):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
        except BlockingIOError:
            continue
        return row
    raise OSError(f"more than {MAX_ROWS} processes count together")


class Distribution:
    """A histogram in consecutive cells: one for each bucket, one for larger values, and the sum."""

    def __init__(self, cells: memoryview[float], start: int, bounds: tuple[float, ...]) -> None:
        self._cells = cells
        self._start = start
        self._sum = start + len(bounds) + 1
        self._bounds = bounds

    @staticmethod
    def size(bounds: tuple[float, ...]) -> int:
        """The number of cells that it uses."""
        return len(bounds) + 2

    def observe(self, value: float, weight: int = 1) -> None:
        """Counts `value`, `weight` times."""
        cells = self._cells
        cells[self._start + bisect_left(self._bounds, value)] += weight
        cells[self._sum] += value * weight

    def observe_all(self, values: Sequence[float], weights: Sequence[int]) -> None:
        """Counts many values at once, each with its weight; for few of them `observe` is as quick."""
        cells, counts = self._cells, np.asarray(weights)
        places = np.searchsorted(self._bounds, values, side="left")
        for place, count in enumerate(np.bincount(places, counts).tolist(), self._start):
            cells[place] += count
        cells[self._sum] += float(np.dot(values, counts))
