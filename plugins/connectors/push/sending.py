"""A worker's half of sending: copies blocks elsewhere beside the layers, and gives them to the threads that send.

They are copied to where the other engine wants them, where this device can write there, else to host memory. Blocks for
which there is no room, or whose other engine has not answered yet, are copied when their request has ended, which keeps
them so long. No step waits for a copy, but the next one for those of this step to have read the cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import KVLayout, Mark, SideQueue

from ..blocks.host_arena import Arena
from ..blocks.row_words import in_words
from .carrier import Carrier, Staged
from .lanes import Lanes
from .messages import Chunk, End, Goal, PushStep, spans
from .parcels import Batch, Parcel, Run

logger = logging.getLogger("frame.connectors.push")

#: A token behind which a layer that looks back some way needs none of the first ones.
_FAR = 1 << 40


@dataclass(eq=False)
class Sending:
    """A request whose blocks are sent; `staged[l]` says which of layer l's are on their way, from place `firsts[g]`.

    `blocks` are given once the request has ended, and `deadline` with them; `mark` is behind the newest copy, `late`
    behind the newest of a lane.
    """

    parcel: Parcel
    firsts: list[int]
    staged: list[np.ndarray]
    blocks: list[list[int]] | None = None
    deadline: float = float("inf")
    mark: Mark = field(default_factory=Mark)
    late: Mark = field(default_factory=Mark)

    @property
    def is_out(self) -> bool:
        """Whether its blocks are read no more."""
        whole = self.parcel.over or all(there.all() for there in self.staged)
        return whole and self.mark.done() and self.late.done()


@dataclass(eq=False)
class Due:
    """What a step fills of a request; of the layers that ran the first `done` are dealt with.

    `blocks` are the chunk's by group, and `ids` the same on the device once they are there.
    """

    sending: Sending
    chunk: Chunk
    blocks: list[np.ndarray]
    ids: list[Tensor | None]
    done: int = 0


class Sendings:
    """See the module. `caches` uint8 [num_blocks, block bytes] are those of layers, of the KV groups `groups`.

    `stage` copies an array to the device, `arena` is host memory; on the queue `late` lanes copy. What ended since it
    was last read is in `sent` and `unsent`.
    """

    def __init__(
        self,
        layout: KVLayout,
        groups: Sequence[int],
        stage: Callable[[np.ndarray], Tensor],
        *,
        arena: Arena,
        lanes: Lanes,
        queue: SideQueue,
        late: SideQueue,
        expiry: float,
    ) -> None:
        self._layout = layout
        self._groups = groups
        self._ids = stage
        self._arena = arena
        self._lanes = lanes
        self._queue = queue
        self._late = late
        self._late_lock = threading.Lock()
        self._expiry = expiry
        self.caches: Sequence[Tensor] = ()
        self._sendings: dict[str, Sending] = {}
        self._dues: list[Due] = []  # of this step
        self._ran: list[int] = []  # its layers so far
        self._copied = False  # whether this step copies what a later one may write to
        #: groups whose blocks a request keeps until it ends, and then until they are sent
        self._stays = [not one.keeps_states and not one.specs[0].first_needed(_FAR) for one in layout.groups]
        self._told: set[str] = set()  # that were in `sent`, and for which the scheduler side may still wait
        self.sent: list[str] = []
        self.unsent: list[str] = []

    def begin(self, step: PushStep) -> None:
        """Called before a step's layers run."""
        self._dues, self._ran = [], []
        self.join()  # where the step before raised
        for owner in step.drops:
            self._drop(owner)
        for start in step.starts:
            self._drop(start.owner)
            self._start(start.owner, start.goal)
        for chunk in step.chunks:
            if (sending := self._sendings.get(chunk.owner)) is not None:
                blocks = [np.array(some, np.int64) for some in chunk.blocks]
                self._dues.append(Due(sending, chunk, blocks, [None] * len(blocks)))
        for end in step.ends:
            self._end(end)
        for goal in step.refused:
            parcel = Parcel("", goal)
            self._lanes.begin(parcel)
            self._lanes.end(parcel)  # the other side sees that it has not got all
        self._answer_lost(step.held)
        for owner, sending in self._sendings.items():
            if sending.blocks is not None and not sending.parcel.over and sending.deadline < float("inf"):
                self._send_rest(owner, sending, sending.blocks)

    def layer_done(self, number: int) -> None:
        """Called when a layer has run: copies of it what this step has filled."""
        if self._dues:
            self._ran.append(number)
            self._send_due()

    def end(self) -> None:
        """Called when a step's layers have run."""
        self._send_due()  # of who has answered since
        self._leave_late()
        self._dues, self._ran = [], []
        self.join()
        for owner in [name for name, one in self._sendings.items() if one.blocks is not None and one.is_out]:
            del self._sendings[owner]
            self._tell(owner)

    def stop_reading(self) -> None:
        """The caches go away: what was not copied is not sent."""
        self._dues = []
        for owner, sending in list(self._sendings.items()):
            if not sending.is_out:
                self._drop(owner)
                self.unsent.append(owner)
                if sending.blocks is not None:
                    self._tell(owner)
        self._queue.mark().wait()
        with self._late_lock:
            self.caches = ()
            self._late.mark().wait()

    def join(self) -> None:
        """What is launched from now on may write to blocks that are being copied."""
        if self._copied:
            self._copied = False
            self._queue.join()

    def _start(self, owner: str, goal: Goal) -> Sending:
        places = spans(self._layout, goal.num_tokens)
        sending = Sending(
            Parcel(owner, goal),
            [first for first, _ in places],
            [np.zeros(places[group][1] - places[group][0], bool) for group in self._groups],
        )
        self._sendings[owner] = sending
        self._lanes.begin(sending.parcel)
        return sending

    def _end(self, end: End) -> None:
        sending = self._sendings.get(end.owner) or self._start(end.owner, end.goal)
        sending.blocks = end.blocks
        sending.deadline = time.monotonic() + self._expiry

    def _drop(self, owner: str) -> None:
        sending = self._sendings.pop(owner, None)
        if sending is not None:
            self._lanes.drop(sending.parcel)

    def _send_due(self) -> None:
        """Has be copied what this step has filled of layers that ran, for those who have answered."""
        runs: dict[Carrier, list[tuple[Sending, Run]]] = {}
        for due in self._dues:
            sending, parcel = due.sending, due.sending.parcel
            if parcel.over or (self._lanes.may_write and not parcel.answered):
                continue
            for number in self._ran[due.done :]:
                group = self._groups[number]
                blocks, first = due.blocks[group], due.chunk.firsts[group]
                if not len(blocks):
                    continue
                if parcel.way is not None:
                    runs.setdefault(parcel.way, []).append(self._run(sending, number, first, blocks))
                elif (room := self._room(number, len(blocks))) is not None:
                    found = due.ids[group]
                    if found is None:  # whose layers have the same blocks
                        found = due.ids[group] = self._ids(blocks)
                    self._stage(sending, number, first, found, room)
            due.done = len(self._ran)
        self._write(runs)

    def _leave_late(self) -> None:
        """Has lanes write what the step has filled, for those who have not answered yet.

        Unless a later step may change it; a request that loses its blocks has what was sent of it dropped.
        """
        if not self._lanes.may_write or not all(self._stays):
            return
        waiting = [due for due in self._dues if not due.sending.parcel.answered and not due.sending.parcel.over]
        if waiting:
            with self._late_lock:
                self._late.run(lambda: None)  # whatever a lane gives it runs behind this step
        for due in waiting:
            parcel = due.sending.parcel
            with parcel.lock:
                if not parcel.answered:
                    parcel.late.append(partial(self._write_late, due, self._ran[due.done :]))

    def _write_late(self, due: Due, numbers: Sequence[int]) -> Batch | None:
        """Runs in a lane's thread."""
        sending, way = due.sending, due.sending.parcel.way
        with self._late_lock:
            if way is None or sending.parcel.over or not self.caches:
                return None
            runs = []
            for number in numbers:
                group = self._groups[number]
                if len(due.blocks[group]):
                    runs.append(self._run(sending, number, due.chunk.firsts[group], due.blocks[group])[1])
            batch = way.write(runs, self.caches, self._late) if runs else None
            if batch is not None:
                sending.late = batch.mark
                for run in runs:
                    sending.staged[run.layer][run.start : run.start + len(run.blocks)] = True
            return batch

    def _run(self, sending: Sending, number: int, first: int, blocks: np.ndarray) -> tuple[Sending, Run]:
        """Blocks of a layer, from place `first` of the prompt."""
        start = first - sending.firsts[self._groups[number]]
        width = self.caches[number].shape[1]
        return sending, Run(sending.parcel, number, start, first, blocks, width)

    def _write(self, runs: dict[Carrier, list[tuple[Sending, Run]]]) -> bool:
        """Has blocks be written to the other engines, by one launch for each of these; False where one is gone."""
        known = True
        for way, some in runs.items():
            batch = way.write([run for _, run in some], self.caches, self._queue)
            if batch is None:
                self._lanes.look(some[0][1].parcel)
                known = False
                continue
            for sending, run in some:
                # a request that loses its blocks otherwise has what was sent of it dropped, whatever that is
                self._copied |= sending.blocks is None and not self._stays[self._groups[run.layer]]
                sending.staged[run.layer][run.start : run.start + len(run.blocks)] = True
                sending.mark = batch.mark
            self._lanes.written(batch)
        return known

    def _room(self, number: int, count: int) -> Tensor | None:
        """Host memory for so many blocks of a layer, uint8 [count, block bytes]; None without room."""
        size = self.caches[number].shape[1]
        memory = self._arena.take(count * size)
        return None if memory is None else memory.view(count, size)

    def _stage(self, sending: Sending, number: int, first: int, ids: Tensor, memory: Tensor) -> None:
        """Copies blocks of a layer, from place `first` of the prompt, to be sent."""
        start = first - sending.firsts[self._groups[number]]
        staged = Staged(number, start, first, memory, ids, self._arena)
        self._queue.run(partial(_copy, self.caches[number], staged))
        staged.mark = sending.mark = self._queue.mark()
        self._copied = True
        sending.staged[number][start : start + len(ids)] = True
        self._lanes.send(sending.parcel, staged)

    def _send_rest(self, owner: str, sending: Sending, blocks: list[list[int]]) -> None:
        """Copies what is not on its way yet of a request that ended, as far as there is room."""
        parcel = sending.parcel
        if time.monotonic() > sending.deadline:
            self._lanes.drop(parcel)
            self.unsent.append(owner)
            return
        if self._lanes.may_write and not parcel.answered:
            return
        runs: list[tuple[Sending, Run]] = []
        for number, there in enumerate(sending.staged):
            if there.all():
                continue
            group = self._groups[number]
            for start, end in _gaps(there):
                if parcel.way is not None:
                    some = np.array(blocks[group][start:end], np.int64)
                    runs.append(self._run(sending, number, sending.firsts[group] + start, some))
                    continue
                while start < end:
                    count = end - start
                    while (room := self._room(number, count)) is None:
                        count //= 2
                        if not count:
                            return
                    ids = self._ids(np.array(blocks[group][start : start + count], np.int64))
                    self._stage(sending, number, sending.firsts[group] + start, ids, room)
                    start += count
        if parcel.way is not None and runs and not self._write({parcel.way: runs}):
            return  # the lane says what became of the connection
        sending.deadline = float("inf")
        self._lanes.end(parcel)

    def _answer_lost(self, held: Sequence[str]) -> None:
        """A step that fails is not heard of here: whoever waits for what it should have begun is told so."""
        self._told &= set(held)
        for owner in held:
            sending = self._sendings.get(owner)
            if (sending is None or sending.blocks is None) and owner not in self._told:
                self._drop(owner)
                self.unsent.append(owner)
                self._tell(owner)

    def _tell(self, owner: str) -> None:
        self.sent.append(owner)
        self._told.add(owner)


def _copy(cache: Tensor, staged: Staged) -> None:
    try:
        with torch.inference_mode():
            source, target = in_words(cache, staged.memory)
            if source.device == target.device:
                torch.index_select(source, 0, staged.kept, out=target)
            else:
                target.copy_(source.index_select(0, staged.kept), non_blocking=True)
    except Exception as error:
        logger.exception("blocks could not be copied")
        staged.error = error


def _gaps(there: np.ndarray) -> Iterator[tuple[int, int]]:
    """The runs [start, end) of places that are False."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], there, [True])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
