"""Running states of the offload connector on a worker: their copies between the device and rows of host memory.

A state is saved from the copy that a step makes for the prefix cache. That block may be given away in the same step, so
it is copied to a buffer before the step goes on, and from there beside the steps. Chooses no row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from frame.interfaces import ConnectorWorkerSetup, KVLayout, Mark

from ..blocks.host_slab import HostSlab
from ..blocks.messages import Move
from ..blocks.step_worker import CHECKED, Stored
from .messages import OffloadStep
from .row_sums import RowSums

logger = logging.getLogger("frame.connectors.offload")

#: Where layers keep tokens too, this part of the host memory is for states.
STATE_SHARE = 1 / 4


def share_of_states(layout: KVLayout, num_bytes: int) -> int:
    """How many of the bytes are for states."""
    states = [group.keeps_states for group in layout.groups]
    return num_bytes if all(states) else int(num_bytes * STATE_SHARE) if any(states) else 0


@dataclass(eq=False)
class StateCopy:
    """A message's states on their way to `rows` of host memory; `good` says of each of them, once `mark` is passed.

    `sums` are their checksums then, and `marks` what they are to be known by, where others may read the memory.
    """

    number: int
    total: int
    places: list[int]
    rows: list[int]
    good: Tensor
    marks: list[tuple[bytes, int]] = field(default_factory=list)
    sums: Tensor | None = None
    begun: float = field(default_factory=time.monotonic)
    mark: Mark = field(default_factory=Mark)
    error: Exception | None = None


class StateCopies:
    """A worker's part: `slab` are its rows, None where it keeps no states; `stored` says what lies in a row."""

    def __init__(self, setup: ConnectorWorkerSetup, stored: Stored, slab: HostSlab | None) -> None:
        self.stored = stored
        self.slab = slab
        self._setup = setup
        self._queue = setup.streams.side_queue()
        device = stored.parts[0].cache.device if stored.parts else torch.device("cpu")
        self._buffer = torch.empty(stored.num_bytes, dtype=torch.uint8, device=device)
        self._sums = RowSums(slab.row_bytes, device) if slab is not None and slab.identity else None
        self._copies: list[StateCopy] = []
        self.begun = -1  # the number of the message whose states were saved last
        self.saved: list[tuple[int, list[int] | None]] = []  # (message, places that failed, None: all), not told yet

    def save(self, step: OffloadStep, sound: Collection[str]) -> None:
        """Begins to copy what the main queue has left in the blocks of the step's states by now."""
        places = [place for place, move in enumerate(step.states) if move.owner in sound]
        good = self._setup.memory.pinned(max(1, len(places))).view(torch.bool)
        rows = [step.state_rows[place] for place in places]
        copy = StateCopy(step.number, len(step.states), places, rows, good.fill_(False))
        if self._sums is not None:
            copy.marks = [step.state_marks[place] for place in places]
            copy.sums = self._setup.memory.pinned(8 * max(1, len(places))).view(torch.int64)
        self.begun = step.number  # from here on `end` tells what became of it
        try:
            for index, place in enumerate(places):
                self._queue.join()  # the buffer is free then
                self._fill(step.states[place])
                self._queue.run(partial(self._tried, copy, index, rows[index]))
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
            for (key, generation), row, place, row_sum in zip(
                copy.marks, copy.rows, copy.places, [] if copy.sums is None else copy.sums.tolist(), strict=False
            ):
                if self.slab is not None and place in saved:
                    self.slab.sign(row, key, generation, 0, row_sum)
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
        """Ends its queue, and lets go of the memory."""
        self.wait()
        self._queue.close()
        if self.slab is not None:
            self.slab.close()

    def _fill(self, move: Move) -> None:
        """Copies a state to the buffer, on the main queue."""
        for part in self.stored.parts:
            self._buffer[part.start : part.end] = part.cache[move.blocks[part.group][0]]

    def _tried(self, copy: StateCopy, index: int, row: int) -> None:
        try:
            with torch.inference_mode():
                for data in self._rows(row):
                    data.copy_(self._buffer, non_blocking=True)
                if copy.sums is not None and self._sums is not None:
                    copy.sums[index : index + 1].copy_(self._sums(self._buffer.view(1, -1)), non_blocking=True)
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
        return [] if self.slab is None else [found[0] for _, found in self.slab.runs([row])]

    def _passed(self, copy: StateCopy) -> None:
        try:
            copy.mark.wait()
        except Exception as error:
            copy.error = copy.error or error
