"""What can be loaded of a prompt: blocks that the tier has, or can have from other engines' shelves or the disk."""

from __future__ import annotations

from typing import Any

from .disk import NoDisk
from .index import TierIndex
from .messages import HERE, Fetch
from .neighbours import NoNeighbours


class TierSources:
    """See the module. Decides nothing about which blocks stay."""

    def __init__(self, index: TierIndex, neighbours: NoNeighbours, disk: NoDisk) -> None:
        self._index = index
        self._neighbours = neighbours
        self._disk = disk

    def found(self, request_id: str, keys: list[bytes]) -> int | None:
        """How many of `keys`, from the first on, can be loaded; None where that is not known yet."""
        index, count, room = self._index, 0, -1
        if not all(map(index.has, keys)):
            self._neighbours.refresh()
        for key in keys:
            if not index.has(key):
                if index.coming(key):
                    return None
                if index.knows(key):
                    break
                if self._neighbours.find(key) is None:
                    held = self._disk.held(request_id, keys)
                    if held is None:
                        return None
                    if key not in held:
                        break
                room = index.room(keys) if room < 0 else room
                if room == 0:
                    break
                room -= 1
            count += 1
        return count

    def found_last(self, request_id: str, keys: list[bytes]) -> int | None:
        """How many of `keys` there are up to the last that can be loaded; None where that is not known yet."""
        index = self._index
        if keys and not index.has(keys[-1]):
            self._neighbours.refresh()
        for place, key in reversed(list(enumerate(keys))):
            if index.has(key):
                return place + 1
            if index.coming(key):
                return None
            if index.knows(key):
                continue
            if self._neighbours.find(key) is None:
                held = self._disk.held(request_id, keys)
                if held is None:
                    return None
                if key not in held:
                    continue
            if index.room([key]):
                return place + 1
        return 0

    def bring(self, request_id: str, keys: list[bytes]) -> list[Fetch]:
        """Has those of `keys` come that are not there, and checks those that are unsure."""
        index, fetches = self._index, list[Fetch]()
        here = [key for key in keys if index.has(key)]
        index.use(here)  # so that none of them has to go for the others
        for key in keys:
            checked = index.has(key)
            row = None if checked and not index.unsure(key) else index.bring(key)
            if row is not None:
                index.use([key])
                here.append(key)
                place = None if checked else self._neighbours.find(key)
                fetches.append(
                    self.fetch(key, row, *((HERE,) if checked else place or (self._disk.place(request_id, key),)))
                )
        index.release(here)
        return fetches

    def fetch(self, key: bytes, row: int, *place: Any) -> Fetch:
        """A block at `row`, with the generation of its slot."""
        return Fetch(key, row, self._index.generation(row), *place)
