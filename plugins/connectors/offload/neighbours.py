"""What the shelves of other engines hold, for the scheduler side. Knows no row's bytes."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from .shelf import Shelf, shelf_names
from .shelf_index import ShelfReader

#: How often the shelves are listed although their folder did not change: some were not made when it did.
_LIST_SECONDS = 0.25
_COARSE_NANOSECONDS = 100_000_000


class Place(NamedTuple):
    """A slot of another engine's shelf, and which content it has."""

    shelf: str
    slot: int
    generation: int


class NoNeighbours:
    """There are none."""

    def refresh(self) -> None:
        """Reads what they have written since the last time."""

    def find(self, key: bytes) -> Place | None:
        """Where the block is, now."""
        del key
        return None

    def forget(self) -> None:
        """What they hold now is not to be found any more."""

    def close(self) -> None:
        """Closes their files."""


class Neighbours(NoNeighbours):
    """The other shelves beside `shelf` whose content has this `shape`, whether their engines live or not.

    `kind` is as in `rows_file`.
    """

    def __init__(self, shelf: Shelf, shape: bytes, kind: str = "") -> None:
        self._shelf = shelf
        self._shape = shape
        self._kind = kind
        self._readers: dict[str, ShelfReader] = {}
        self._listed, self._changed = float("-inf"), 0
        self._since = 0
        self.refresh()

    def refresh(self) -> None:
        now, changed = time.monotonic(), os.fstat(self._shelf.space).st_mtime_ns
        if changed != self._changed or now - self._listed > _LIST_SECONDS:
            # its time is that of a coarse clock: it may change again without another time
            self._listed, self._changed = now, changed if time.time_ns() - changed > _COARSE_NANOSECONDS else 0
            names = {name for name in shelf_names(self._shelf.space) if name != self._shelf.name}
            gone = {name for name, reader in self._readers.items() if not reader.is_current}
            for name in gone | (self._readers.keys() - names):
                self._readers.pop(name).close()
            for name in names - self._readers.keys():
                try:
                    self._readers[name] = ShelfReader(self._shelf.space, name, self._shape, self._kind)
                except (OSError, ValueError):
                    continue  # it is not made yet, or goes away, or is of another shape
        for reader in self._readers.values():
            reader.catch_up()

    def find(self, key: bytes) -> Place | None:
        for name, reader in self._readers.items():
            found = reader.find(key, self._since)
            if found is not None:
                return Place(name, *found)
        return None

    def forget(self) -> None:
        self._since = time.time_ns()

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers = {}
