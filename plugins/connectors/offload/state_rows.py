"""Running states of the offload connector on the scheduler side: which rows of host memory hold which.

A row holds one state. States come from elsewhere and leave as blocks of tokens do, in rows of their own. Chooses no
policy, and sees no byte.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from ..blocks.messages import Move
from .disk import NoDisk
from .index import TierIndex
from .messages import Fetch, Kind
from .neighbours import NoNeighbours
from .tier_sources import TierSources
from .transfers import Transfer, Transfers

#: What kinds of states are called among transfers.
STATE_KINDS: dict[Kind, Kind] = {"save state": "save", "fetch state": "fetch", "leave state": "leave"}


@dataclass(frozen=True)
class StateSaves:
    """What a message has saved: `moves`, to `rows`, which are known by `marks`, key and generation."""

    moves: list[Move]
    rows: list[int]
    marks: list[tuple[bytes, int]]


class StateRows:
    """`index` has a row for each state, which `num_workers` write; `neighbours` and `disk` have others.

    So many rows are to be free as `num_free` says, so that a state that needs one need not wait for the disk.
    """

    def __init__(
        self, index: TierIndex, num_workers: int, neighbours: NoNeighbours, disk: NoDisk, num_free: int = 0
    ) -> None:
        self.index = index
        self._neighbours = neighbours
        self._disk = disk
        self._sources = TierSources(index, neighbours, disk)
        self._num_workers = num_workers
        self._num_free = num_free
        self._transfers = Transfers()
        self._used: list[bytes] = []
        self._fetches: list[Fetch] = []  # that the next message has
        self._reading: dict[int, list[bytes]] = {}  # by the number of the message that has them loaded

    @property
    def waits(self) -> bool:
        """Whether states are being saved, brought or written to the disk."""
        return bool(self._transfers)

    def found(self, request_id: str, keys: list[bytes]) -> int | None:
        """How many of `keys` there are up to the last that can be loaded; None where that is not known yet."""
        return self._sources.found_last(request_id, keys)

    def use(self, request_id: str, moves: Sequence[Move]) -> None:
        """The next message has these loaded, which are of one request."""
        keys = [move.key for move in moves]
        self._fetches += self._sources.bring(request_id, keys)
        keys = [key for key in keys if self.index.knows(key)]
        self.index.use(keys)
        self._used += keys

    def forget(self, request_id: str) -> None:
        """The request asks no more."""
        self._disk.forget(request_id)

    def rows(self, number: int, loads: Sequence[Move]) -> list[int]:
        """The rows that message `number`, which is the next one, has loaded; -1: there was no room."""
        if self._used:
            self._reading[number], self._used = self._used, []
        return [self.index.row(move.key, 0) for move in loads]

    def loaded(self, number: int) -> None:
        """All workers have ended the loads of a message."""
        self.index.release(self._reading.pop(number, []))

    def begin(self, number: int, moves: Sequence[Move]) -> tuple[StateSaves, list[Fetch], list[Fetch]]:
        """Those of `moves` that message `number` has saved, what it has brought, and what goes to the disk."""
        taken = [(move, row) for move in moves if (row := self.index.begin(move.key, 0, move.owner)) is not None]
        fetches, self._fetches = self._fetches, []
        leaves = [self._sources.fetch(key, self.index.row(key, 0)) for key in self.index.leave(self._num_free)]
        transfer = Transfer(
            loads={},
            saves=[(move.key, move.owner) for move, _ in taken],
            blocks=[],
            fetches=[fetch.key for fetch in fetches],
            leaves=[leave.key for leave in leaves],
        )
        self._transfers.begin(number, transfer, self._num_workers)
        marks = [(move.key, self.index.generation(row)) for move, row in taken]
        return StateSaves([move for move, _ in taken], [row for _, row in taken], marks), fetches, leaves

    def end(self, kind: Kind, number: int, bad: list[int] | None) -> None:
        """A worker has ended what a message asked for, but for the places `bad`; None: for all."""
        kind = STATE_KINDS[kind]
        transfer = self._transfers.end(number, kind, bad)
        if transfer is not None:
            self._end(kind, transfer, transfer.bad.get(kind, set()))

    def settle(self, running: Collection[str]) -> None:
        """See `TierIndex.settle`."""
        self.index.settle(running)

    def lost(self) -> int:
        """How many states went without having been written to the disk, if there is one, since the last call."""
        lost, self.index.dropped = self.index.dropped, 0
        return lost if self._num_free else 0

    def clear(self, blocks_name: str) -> None:
        """Drops all, also what lies elsewhere; nothing may be read."""
        self.index.clear()
        leaving = [key for one in self._transfers if "leave" in one.pending for key in one.leaves]
        self._disk.clear(blocks_name, leaving)
        self._neighbours.forget()

    def close(self) -> None:
        """Ends what it has open."""
        self._disk.close()
        self._neighbours.close()
        self.index.close()

    def _end(self, kind: Kind, transfer: Transfer, bad: Container[int]) -> None:
        match kind:
            case "save":
                for place, (key, owner) in enumerate(transfer.saves):
                    self.index.end(key, owner, good=place not in bad)
            case "fetch":
                for place, key in enumerate(transfer.fetches):
                    self.index.brought(key, good=place not in bad)
            case "leave":
                for key in transfer.leaves:
                    self.index.left(key)
                    self._disk.left(key)
