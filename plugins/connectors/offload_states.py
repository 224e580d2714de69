"""Running states of the offload connector: which rows of host memory hold which, and their copies on a worker.

A state is saved from the copy that a step makes for the prefix cache. That block may be given away in the same step, so
it is copied to a buffer before the step goes on, and from there beside the steps. Chooses no policy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from frame.interfaces import ConnectorWorkerSetup, KVLayout, Mark

from .block_messages import Move
from .host_slab import HostSlab
from .offload_index import TierIndex
from .step_worker import CHECKED, Stored

logger = logging.getLogger("frame.connectors.offload")

#: Where layers keep tokens too, this part of the host memory is for states.
STATE_SHARE = 1 / 4


def share_of_states(layout: KVLayout, num_bytes: int) -> int:
    """How many of the bytes are for states."""
    states = [group.keeps_states for group in layout.groups]
    return num_bytes if all(states) else int(num_bytes * STATE_SHARE) if any(states) else 0


@dataclass
class Saving:
    """(key, owner) of the states that a message has saved, until all workers have done it; `bad` of them failed."""

    states: list[tuple[bytes, str]]
    waiting: int
    bad: set[int] = field(default_factory=set)


class StateRows:
    """The scheduler side's part; `index` has a row for each state. `num_workers` write each of them."""

    def __init__(self, index: TierIndex, num_workers: int) -> None:
        self.index = index
        self._num_workers = num_workers
        self._saving: dict[int, Saving] = {}  # by the number of their message
        self._used: list[bytes] = []
        self._reading: dict[int, list[bytes]] = {}  # by the number of the message that has them loaded

    @property
    def waits(self) -> bool:
        """Whether states are being saved."""
        return bool(self._saving)

    def use(self, moves: Sequence[Move]) -> None:
        """The next message has these loaded."""
        keys = [move.key for move in moves]
        self.index.use(keys)
        self._used += keys

    def rows(self, number: int, loads: Sequence[Move]) -> list[int]:
        """The rows that message `number`, which is the next one, has loaded."""
        if self._used:
            self._reading[number], self._used = self._used, []
        return [self.index.row(move.key, 0) for move in loads]

    def loaded(self, number: int) -> None:
        """All workers have ended the loads of a message."""
        self.index.release(self._reading.pop(number, []))

    def save(self, number: int, moves: Sequence[Move]) -> tuple[list[Move], list[int]]:
        """Those of `moves` that message `number` has saved, and their rows."""
        taken = [(move, row) for move in moves if (row := self.index.begin(move.key, 0, move.owner)) is not None]
        if taken:
            self._saving[number] = Saving([(move.key, move.owner) for move, _ in taken], self._num_workers)
        return [move for move, _ in taken], [row for _, row in taken]

    def saved(self, number: int, bad: list[int] | None) -> None:
        """A worker has ended the saves of a message; None: none succeeded."""
        saving = self._saving.get(number)
        if saving is None:
            return
        saving.waiting -= 1
        saving.bad.update(range(len(saving.states)) if bad is None else bad)
        if not saving.waiting:
            del self._saving[number]
            for place, (key, owner) in enumerate(saving.states):
                self.index.end(key, owner, good=place not in saving.bad)

    def settle(self, running: Collection[str]) -> None:
        """See `TierIndex.settle`."""
        self.index.settle(running)


@dataclass(eq=False)
class StateCopy:
    """A message's states on their way to host memory; `good` says of each of them, once `mark` is passed."""

    number: int
    total: int
    places: list[int]
    good: Tensor
    begun: float = field(default_factory=time.monotonic)
    mark: Mark = field(default_factory=Mark)
    error: Exception | None = None


class StateCopies:
    """A worker's part: `slab` are its rows, `stored` says how a state is divided over layers."""

    def __init__(self, setup: ConnectorWorkerSetup, stored: Stored, num_bytes: int) -> None:
        self.stored = stored
        self._setup = setup
        self._queue = setup.streams.side_queue()
        self._slab = HostSlab(stored.num_bytes, num_bytes, setup.memory.pinned) if stored.num_bytes else None
        device = stored.parts[0].cache.device if stored.parts else None
        self._buffer = torch.empty(stored.num_bytes, dtype=torch.uint8, device=device)
        self._copies: list[StateCopy] = []
        self.begun = -1  # the number of the message whose states were saved last
        self.saved: list[tuple[int, list[int] | None]] = []  # (message, places that failed, None: all), not told yet

    @property
    def num_rows(self) -> int:
        """States that host memory holds."""
        return 0 if self._slab is None else self._slab.num_rows

    def save(self, number: int, moves: Sequence[Move], rows: Sequence[int], sound: Collection[str]) -> None:
        """Begins to copy what the main queue has left in the blocks of `moves` by now."""
        self.begun = number
        places = [place for place, move in enumerate(moves) if move.owner in sound]
        good = self._setup.memory.pinned(max(1, len(places))).view(torch.bool)
        copy = StateCopy(number, len(moves), places, good.fill_(False))
        try:
            for index, place in enumerate(places):
                self._queue.join()  # the buffer is free then
                self._fill(moves[place])
                self._queue.run(partial(self._tried, copy, index, rows[place]))
        except Exception as error:
            logger.exception("states could not be copied")
            copy.error = error
        copy.mark = self._queue.mark()
        self._copies.append(copy)

    def load(self, move: Move, row: int) -> None:
        """Copies a state from host memory to the block of `move`; called on the queue of loads."""
        for data in self._rows(row):
            for part in self.stored.parts:
                (block,) = move.blocks[part.group]
                part.cache[block].copy_(data[part.start : part.end], non_blocking=True)

    def end(self) -> tuple[int, int, float]:
        """Notes which saves have ended; returns how many states they saved, and did not, and the seconds of all."""
        count, total, seconds = 0, 0, 0.0
        while self._copies and self._copies[0].mark.done():
            copy = self._copies.pop(0)
            self._passed(copy)
            good = [] if copy.error is not None else copy.good.tolist()
            saved = {place for place, one in zip(copy.places, good, strict=False) if one}
            bad = None if not saved else [place for place in range(copy.total) if place not in saved]
            self.saved.append((copy.number, bad))
            count, total = count + len(saved), total + copy.total
            seconds += time.monotonic() - copy.begun
        return count, total - count, seconds

    def wait(self) -> None:
        """Returns once no copy is under way."""
        for copy in self._copies:
            self._passed(copy)

    def close(self) -> None:
        """Ends its queue."""
        self.wait()
        self._queue.close()

    def _fill(self, move: Move) -> None:
        """Copies a state to the buffer, on the main queue."""
        for part in self.stored.parts:
            self._buffer[part.start : part.end] = part.cache[move.blocks[part.group][0]]

    def _tried(self, copy: StateCopy, index: int, row: int) -> None:
        try:
            with torch.inference_mode():
                for data in self._rows(row):
                    data.copy_(self._buffer, non_blocking=True)
                copy.good[index : index + 1].copy_(self._finite(), non_blocking=True)
        except Exception as error:
            logger.exception("states could not be copied")
            copy.error = error

    def _finite(self) -> Tensor:
        """Whether the buffer holds numbers only, bool [1]: others fail the request that made them, and no later one."""
        finite = torch.ones(1, dtype=torch.bool, device=self._buffer.device)
        for dtype, start, end in self.stored.runs:
            if dtype in CHECKED:
                finite &= self._buffer[start:end].view(dtype).to(CHECKED[dtype]).isfinite().all()
        return finite

    def _rows(self, row: int) -> list[Tensor]:
        """That row; none where this rank has no layers that keep states."""
        return [] if self._slab is None else [found[0] for _, found in self._slab.runs([row])]

    def _passed(self, copy: StateCopy) -> None:
        try:
            copy.mark.wait()
        except Exception as error:
            copy.error = copy.error or error
