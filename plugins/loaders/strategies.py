"""In which order the bytes of safetensors files come: as they are needed, file by file, or ahead of need."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

from torch import Tensor

#: Values of a part for which a whole file is not read: those of samples, and of vectors that are sharded.
_FEW = 1 << 12
_PIECE_BYTES, _NUM_READERS = 16 << 20, 4


class Strategy:
    """Maps files, and leaves reading to the system: the strategy "lazy"."""

    def expect(self, paths: Sequence[Path]) -> None:
        """Called with the files, in order, before any of them is read."""

    def tensors(self, path: Path, shape: Sequence[int], index: Sequence[slice]) -> Mapping[str, Tensor] | None:
        """Called before the part `index` of a tensor is read: the tensors of the file, None to read it from the map."""
        del path, shape, index
        return None


class Whole(Strategy):
    """Reads a file whole when the first of its tensors is asked for, and keeps the newest files that are in use."""

    def __init__(self, read: Callable[[Path], Mapping[str, Tensor]], most: int = 2) -> None:
        self._read, self._most, self._kept = read, most, dict[Path, Mapping[str, Tensor]]()
        self._lock = threading.Lock()

    def tensors(self, path: Path, shape: Sequence[int], index: Sequence[slice]) -> Mapping[str, Tensor] | None:
        sizes = [len(range(size)[taken]) for size, taken in zip(shape, index, strict=False)]
        is_few = prod((*sizes, *shape[len(sizes) :])) <= _FEW
        with self._lock:
            if path not in self._kept:
                if is_few:
                    return None
                while len(self._kept) >= self._most:
                    del self._kept[next(iter(self._kept))]
                self._kept[path] = self._read(path)
            return self._kept[path]


class Prefetch(Strategy):
    """Has threads read all files once, from when the first tensor is read, so that they are in the page cache."""

    def __init__(self) -> None:
        self._paths: Sequence[Path] = ()
        self._lock = threading.Lock()

    def expect(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def tensors(self, path: Path, shape: Sequence[int], index: Sequence[slice]) -> Mapping[str, Tensor] | None:
        with self._lock:
            paths, self._paths = self._paths, ()
        if paths:
            pool = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="frame-prefetch")
            for one in paths:
                pool.submit(touch, one)
            pool.shutdown(wait=False)
        return None


def touch(path: Path) -> int:
    """Reads a file and drops what it reads; returns its bytes."""
    total, buffer = 0, bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            total += count
    return total


def _bytes_of(path: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load

    found: Mapping[str, Tensor] = load(path.read_bytes())
    return found


def make_strategy(name: str) -> Strategy:
    """The strategy of this name."""
    return {"lazy": Strategy, "eager": lambda: Whole(_bytes_of), "prefetch": Prefetch}[name]()
