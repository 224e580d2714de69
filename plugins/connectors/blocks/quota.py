"""Keeps a tree of files below a number of bytes by removing the least recently used.

Readers set a file's modification time to the time of use, because many systems do not record access times. Several
processes may limit one tree; each counts its own writes and counts the whole tree again from time to time. Knows no
block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Share of the limit that a process may write before it counts the tree again.
RECOUNT = 1 / 16
#: Share of the limit to which the tree is cut, so that cutting is rare.
CUT_TO = 0.9


class Quota:
    """The limit on the files below `root`; None is no limit."""

    def __init__(self, root: Path, max_bytes: int | None) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._used: int | None = None
        self._written = 0

    @property
    def used(self) -> int | None:
        """Bytes below the root; None before they were counted."""
        return self._used

    def make_room(self, size: int) -> bool:
        """Removes files until `size` more bytes fit; False when they never will."""
        if self._max_bytes is None:
            return True
        if size > self._max_bytes:
            return False
        if self._used is None or self._written > self._max_bytes * RECOUNT:
            self._used = sum(found[1] for found in _files(self._root))
            self._written = 0
        if self._used + size > self._max_bytes:
            self._cut(max(0, int(self._max_bytes * CUT_TO) - size))
        return True

    def add(self, size: int) -> None:
        """Notes that `size` bytes were written."""
        if self._used is not None:
            self._used += size
            self._written += size

    def _cut(self, target: int) -> None:
        files = sorted(_files(self._root))
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used <= target:
                break
            with suppress(OSError):
                os.unlink(path)
            used -= size
        self._used, self._written = used, 0


def _files(folder: Path | str) -> Iterator[tuple[int, int, str]]:
    """(last use in nanoseconds, bytes, path) of every file below `folder`; skips files that vanish meanwhile."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
                continue
            with suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                yield found.st_mtime_ns, found.st_size, entry.path
