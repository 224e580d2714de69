"""A worker's half of sending: copies blocks elsewhere beside the layers, and gives them to the threads that send.

They are copied to host memory, or within the device where that writes them to another one. Blocks for which there is no
room are copied when their request has ended, which keeps them so long.
"""

from __future__ import annotations

import logging
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
from .carrier import Staged
from .lanes import Lanes
from .messages import Chunk, End, Goal, PushStep, spans
from .parcels import Parcel

logger = logging.getLogger("frame.connectors.push")


@dataclass(eq=False)
class Sending:
    """A request whose blocks are sent; `staged[l]` says which of layer l's are on their way, from place `firsts[g]`.

    `blocks` are given once the request has ended, and `deadline` with them; `mark` is behind the newest copy.
    """

    parcel: Parcel
    firsts: list[int]
    staged: list[np.ndarray]
    blocks: list[list[int]] | None = None
    deadline: float = float("inf")
    mark: Mark = field(default_factory=Mark)

    @property
    def is_out(self) -> bool:
        """Whether its blocks are read no more."""
        return (self.parcel.over or all(there.all() for there in self.staged)) and self.mark.done()


class Sendings:
    """See the module. `caches` uint8 [num_blocks, block bytes] are those of layers, of the KV groups `groups`.

    `stage` copies an array to the device, `arena` is host memory, `near` the device's, if there is any for this. What
    ended since it was last read is in `sent` and `unsent`.
    """

    def __init__(
        self,
        layout: KVLayout,
        groups: Sequence[int],
        stage: Callable[[np.ndarray], Tensor],
        *,
        arena: Arena,
        near: Arena | None = None,
        lanes: Lanes,
        queue: SideQueue,
        expiry: float,
    ) -> None:
        self._layout = layout
        self._groups = groups
        self._ids = stage
        self._arena = arena
        self._near = near
        self._lanes = lanes
        self._queue = queue
        self._expiry = expiry
        self.caches: Sequence[Tensor] = ()
        self._sendings: dict[str, Sending] = {}
        self._chunks: list[tuple[Sending, Chunk, list[Tensor | None]]] = []  # of this step, with block ids by group
        self._copied = False  # whether this step copies
        self._told: set[str] = set()  # that were in `sent`, and for which the scheduler side may still wait
        self.sent: list[str] = []
        self.unsent: list[str] = []

    def begin(self, step: PushStep) -> None:
        """Called before a step's layers run."""
        self._chunks = []
        self.join()  # where the step before raised
        for owner in step.drops:
            self._drop(owner)
        for start in step.starts:
            self._drop(start.owner)
            self._start(start.owner, start.goal)
        for chunk in step.chunks:
            if (sending := self._sendings.get(chunk.owner)) is not None:
                self._chunks.append((sending, chunk, [None] * len(chunk.blocks)))
        for end in step.ends:
            self._end(end)
        for goal in step.refused:
            parcel = Parcel("", goal)
            self._lanes.begin(parcel)
            self._lanes.end(parcel)  # the other side sees that it has not got all
        self._answer_lost(step.held)
        for owner, sending in self._sendings.items():
            if sending.blocks is not None and not sending.parcel.over:
                self._send_rest(owner, sending, sending.blocks)

    def layer_done(self, number: int) -> None:
        """Called when a layer has run: copies of it what this step has filled."""
        group = self._groups[number]
        for sending, chunk, ids in self._chunks:
            if not chunk.blocks[group] or sending.parcel.over:
                continue
            if (room := self._room(sending, number, len(chunk.blocks[group]))) is not None:
                found = ids[group]
                if found is None:  # whose layers have the same blocks
                    found = ids[group] = self._ids(np.array(chunk.blocks[group], np.int64))
                self._stage(sending, number, chunk.firsts[group], found, room)

    def end(self) -> None:
        """Called when a step's layers have run."""
        self._chunks = []
        self.join()
        for owner in [name for name, one in self._sendings.items() if one.blocks is not None and one.is_out]:
            del self._sendings[owner]
            self._tell(owner)

    def stop_reading(self) -> None:
        """The caches go away: what was not copied is not sent."""
        for owner, sending in list(self._sendings.items()):
            if not sending.is_out:
                self._drop(owner)
                self.unsent.append(owner)
                if sending.blocks is not None:
                    self._tell(owner)
        self._queue.mark().wait()
        self.caches = ()

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

    def _room(self, sending: Sending, number: int, count: int) -> tuple[Arena, Tensor] | None:
        """Memory for so many blocks of a layer, uint8 [count, block bytes], behind its arena; None without room."""
        near = self._near if self._lanes.from_device(sending.parcel) else None
        arena = self._arena if near is None else near
        size = self.caches[number].shape[1]
        memory = arena.take(count * size)
        return None if memory is None else (arena, memory.view(count, size))

    def _stage(self, sending: Sending, number: int, first: int, ids: Tensor, room: tuple[Arena, Tensor]) -> None:
        """Copies blocks of a layer, from place `first` of the prompt, to be sent."""
        cache, (arena, memory) = self.caches[number], room
        start = first - sending.firsts[self._groups[number]]
        staged = Staged(number, start, first, memory, ids, arena)
        self._queue.run(partial(_copy, cache, staged))
        staged.mark = sending.mark = self._queue.mark()
        self._copied = True
        sending.staged[number][start : start + len(ids)] = True
        self._lanes.send(sending.parcel, staged)

    def _send_rest(self, owner: str, sending: Sending, blocks: list[list[int]]) -> None:
        """Copies what is not on its way yet of a request that ended, as far as there is room."""
        if time.monotonic() > sending.deadline:
            self._lanes.drop(sending.parcel)
            self.unsent.append(owner)
            return
        for number, there in enumerate(sending.staged):
            group = self._groups[number]
            for start, end in _gaps(there):
                while start < end:
                    count = end - start
                    while (room := self._room(sending, number, count)) is None:
                        count //= 2
                        if not count:
                            return
                    ids = self._ids(np.array(blocks[group][start : start + count], np.int64))
                    self._stage(sending, number, sending.firsts[group] + start, ids, room)
                    start += count
        sending.deadline = float("inf")
        self._lanes.end(sending.parcel)

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
