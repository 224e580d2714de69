"""Numbers that several API processes count together: each has a file of its own, and whoever is asked adds them up.

A file is an array of float64 in shared memory, locked by its process while it lives, so that counting is a plain
addition and a dead process's counts are kept while its gauges are not. Knows no metric.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left
from pathlib import Path

_BYTES = 8


class Tallies:
    """`size` cells of this process, the last `num_gauges` of which end with it. Without a folder nobody shares them."""

    def __init__(self, size: int, num_gauges: int, folder: Path | None = None) -> None:
        self._size = size
        self._num_gauges = num_gauges
        self._folder = folder
        self._file = -1
        memory = mmap.mmap(self._create(folder), size * _BYTES) if folder is not None else bytearray(size * _BYTES)
        self.cells: memoryview[float] = _doubles(memory)

    def _create(self, folder: Path) -> int:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._path = folder / f"{os.getpid()}.tallies"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(self._file, self._size * _BYTES)
        return self._file

    def total(self) -> list[float]:
        """Every cell, summed over the processes."""
        sums: list[float] = list(self.cells)
        if self._folder is None:
            return sums
        counts = self._size - self._num_gauges
        for path in self._folder.glob("*.tallies"):
            if path != self._path and (other := self._read(path)) is not None:
                values, alive = other
                for index in range(self._size if alive else counts):
                    sums[index] += values[index]
        return sums

    def _read(self, path: Path) -> tuple[memoryview[float], bool] | None:
        """A sibling's cells, and whether it lives; None for a file that is not one of ours."""
        try:
            with path.open("rb") as file:
                data = file.read()
                alive = not _lockable(file.fileno())
        except OSError:
            return None
        return (_doubles(data), alive) if len(data) == self._size * _BYTES else None


def _doubles(memory: bytes | bytearray | mmap.mmap) -> memoryview[float]:
    return memoryview(memory).cast("d")


def _lockable(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Distribution:
    """A histogram in consecutive cells: one for each bucket, one for what lies above, and the sum."""

    def __init__(self, cells: memoryview[float], start: int, bounds: tuple[float, ...]) -> None:
        self._cells = cells
        self._start = start
        self._sum = start + len(bounds) + 1
        self._bounds = bounds

    @staticmethod
    def size(bounds: tuple[float, ...]) -> int:
        """Cells that it takes."""
        return len(bounds) + 2

    def observe(self, value: float, weight: int = 1) -> None:
        """Counts `value`, `weight` times."""
        cells = self._cells
        cells[self._start + bisect_left(self._bounds, value)] += weight
        cells[self._sum] += value * weight
