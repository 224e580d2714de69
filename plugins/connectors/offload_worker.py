"""The worker side of the offload connector: copies blocks between the device and host memory, beside the steps.

Loads and saves have a queue each. A block goes through a buffer on the device, in which all its layers lie side by
side, so that it crosses to the host in one piece. Knows of a request only its id, and chooses no row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import CacheView, ConnectorWorkerSetup, Mark, SideQueue, TransferReport, encode

from .block_messages import BlockStep, Move
from .host_slab import HostSlab, check_room
from .offload_messages import Hello, OffloadNote, OffloadOptions, OffloadStep
from .offload_states import StateCopies, share_of_states
from .step_worker import CHECKED, StepWorker

logger = logging.getLogger("frame.connectors.offload")

#: Bytes of the buffer on the device through which each queue copies.
BUFFER_BYTES = 32 << 20
_MOST_ROWS = 256


@dataclass(eq=False)
class Copy:
    """Copies under way: of message `number`, for the request `owner` if they are loads; `moves` with their `rows`.

    `states` are what is loaded besides, with their rows. `finite` [n] says of saves which hold numbers only, once
    `mark` is passed. `places` are those of saves among the `total` of their message. `error` is what a copy raised.
    """

    number: int
    owner: str
    moves: Sequence[Move]
    rows: Sequence[int]
    places: Sequence[int] = ()
    total: int = 0
    finite: Tensor | None = None
    states: Sequence[tuple[Move, int]] = ()
    begun: float = field(default_factory=time.monotonic)
    mark: Mark = field(default_factory=Mark)
    error: Exception | None = None


class OffloadWorker(StepWorker):
    """See the module."""

    title = "offload"
    message = OffloadStep

    def __init__(self, setup: ConnectorWorkerSetup, options: OffloadOptions) -> None:
        super().__init__(setup, options)
        self.next_number = 0
        self._share = options.num_bytes // setup.mesh.engine_size
        check_room(self._share)
        self._first = self.place == 0
        self._slab: HostSlab | None = None
        self._states: StateCopies | None = None
        self._load_queue: SideQueue = setup.streams.side_queue()
        self._save_queue: SideQueue = setup.streams.side_queue()
        self._load_buffer = self._save_buffer = torch.empty(0)
        self._loading: list[Copy] = []
        self._saving: list[Copy] = []
        self._skipped: list[int] = []  # messages that never came
        self._ended: list[str] = []  # requests whose loads they asked for
        self._note = OffloadNote(0)
        self._gauges: dict[str, float] = {}

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if not caches:
            self._wait()
        super().register(caches)
        size, states = self.tokens.num_bytes, share_of_states(self.layout, self._share)
        if caches and states:
            if self._states is None:
                self._states = StateCopies(self.setup, self.states, states)
            self._states.stored = self.states
        if caches and self._slab is None:
            if size:
                self._slab = HostSlab(size, self._share - states, self.setup.memory.pinned)
            count = max(1, min(_MOST_ROWS, BUFFER_BYTES // max(1, size)))
            device = next(iter(caches.values())).bytes.device
            shape = (count, size)
            self._load_buffer = torch.empty(shape, dtype=torch.uint8, device=device)
            self._save_buffer = torch.empty(shape, dtype=torch.uint8, device=device)

    def handshake(self) -> bytes:
        num_states = 0 if self._states is None else self._states.num_rows
        num_rows = 0 if self._slab is None else self._slab.num_rows
        return encode(Hello(num_rows, self.tokens.num_bytes, num_states, self.states.num_bytes))

    def lost(self, skipped: range, broken: int) -> None:
        self._skipped += skipped
        for number in skipped:
            self._note.loaded.append(number)
            self._note.saved.append((number, None))
            self._note.states.append((number, None))
        if broken >= 0:
            self._note.saved.append((broken, None))
            if self._states is not None and self._states.begun != broken:
                self._note.states.append((broken, None))
        # what the lost messages said of blocks that are given away is not known
        self._save_queue.join()

    def save_states(self, moves: Sequence[Move]) -> None:
        if isinstance(self._step, OffloadStep) and self._states is not None:
            self._states.save(self._step.number, moves, self._step.state_rows, self._sound)

    def load(self, step: BlockStep) -> None:
        if not isinstance(step, OffloadStep):
            return
        if step.join:
            self._save_queue.join()
        # the scheduler gave up on these loads when their step failed, and keeps their blocks until somebody speaks
        self._ended += [owner for number in self._skipped for owner in step.waiting.get(number, ())]
        self._skipped = []
        states: dict[str, list[tuple[Move, int]]] = {}
        by_owner: dict[str, list[int]] = {}
        for place, move in enumerate(step.loads):
            by_owner.setdefault(move.owner, []).append(place)
        for move, row in zip(step.state_loads, step.state_load_rows, strict=True):
            states.setdefault(move.owner, []).append((move, row))
            by_owner.setdefault(move.owner, [])
        for owner, places in by_owner.items():
            rows = [step.load_rows[place] for place in places]
            copy = Copy(step.number, owner, [step.loads[place] for place in places], rows)
            copy.states = states.get(owner, [])
            self._run(self._load_queue, copy, self._read)
            self._loading.append(copy)
        if self._first:
            self.count("lookup_tokens", step.lookups)
            self.count("hit_tokens", step.hits)
            if step.size_bytes:
                self._gauges = {"offload_used_bytes": step.used_bytes, "offload_size_bytes": step.size_bytes}

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        step = self._step
        if isinstance(step, OffloadStep) and step.saves:
            self._save_sound(step)
        self._sound.difference_update(finished)
        self._in_step = False
        received = self._end_loads()
        self._end_saves()
        if self._states is not None:
            count, unsaved, seconds = self._states.end()
            self.count("saved_states", count)
            self.count("unsaved_states", unsaved)
            self.count("save_bytes", count * self.states.num_bytes)
            self.count("save_seconds", seconds if self._first else 0)
            self._note.states += self._states.saved
            self._states.saved = []
        notes, told = [], self._note
        if told.loaded or told.saved or told.states or told.breaks != self._breaks:
            told.breaks = self._breaks
            notes.append((self.rank, encode(told)))
        self._note = OffloadNote(self._breaks)
        return TransferReport(
            received=received, failed_blocks=self.failed, counters=self._counters, gauges=self._gauges, notes=notes
        )

    def close(self) -> None:
        self._wait()
        if self._states is not None:
            self._states.close()
        self._load_queue.close()
        self._save_queue.close()

    def _save_sound(self, step: OffloadStep) -> None:
        places = [place for place, move in enumerate(step.saves) if move.owner in self._sound]
        if not places:
            self._note.saved.append((step.number, None))
            self.count("unsaved_blocks", len(step.saves))
            return
        rows = [step.save_rows[place] for place in places]
        copy = Copy(step.number, "", [step.saves[place] for place in places], rows, places, len(step.saves))
        copy.finite = self.setup.memory.pinned(len(places)).view(torch.bool)
        self._run(self._save_queue, copy, self._write)
        self.count("unsaved_blocks", len(step.saves) - len(places))
        self._saving.append(copy)

    def _run(self, queue: SideQueue, copy: Copy, work: Callable[[Copy], None]) -> None:
        queue.run(partial(self._tried, copy, work))
        copy.mark = queue.mark()

    def _tried(self, copy: Copy, work: Callable[[Copy], None]) -> None:
        try:
            with torch.inference_mode():
                work(copy)
        except Exception as error:
            logger.exception("blocks could not be copied")
            copy.error = error

    def _read(self, copy: Copy) -> None:
        """From host memory to the blocks of `copy.moves`."""
        buffer = self._load_buffer
        for start in range(0, len(copy.moves), len(buffer)):
            moves, rows = copy.moves[start : start + len(buffer)], copy.rows[start : start + len(buffer)]
            for place, run in self._host(rows):
                buffer[place : place + len(run)].copy_(run, non_blocking=True)
            staged: dict[int, Sequence[Tensor]] = {}  # by KV group, whose layers have the same blocks
            for part in self.tokens.parts:
                if part.group not in staged:
                    needed = [
                        (place, block)
                        for row, move in enumerate(moves)
                        for place, block in enumerate(move.blocks[part.group], row * part.count)
                        if block
                    ]
                    staged[part.group] = (
                        self.setup.streams.stage(np.array(needed, np.int64).T).unbind(0) if needed else ()
                    )
                if staged[part.group]:
                    places, blocks = staged[part.group]
                    found = buffer[: len(moves), part.start : part.end].reshape(-1, part.cache.shape[1])
                    part.cache.index_copy_(0, blocks, found.index_select(0, places))

        for move, row in copy.states:
            if self._states is not None:
                self._states.load(move, row)

    def _write(self, copy: Copy) -> None:
        """From the blocks of `copy.moves` to host memory."""
        buffer, finite = self._save_buffer, copy.finite
        for start in range(0, len(copy.moves), len(buffer)):
            moves, rows = copy.moves[start : start + len(buffer)], copy.rows[start : start + len(buffer)]
            good = torch.ones(len(moves), dtype=torch.bool, device=buffer.device)
            staged: dict[int, Tensor] = {}  # by KV group, whose layers have the same blocks
            for part in self.tokens.parts:
                if part.group not in staged:
                    numbers = np.array([block for move in moves for block in move.blocks[part.group]], np.int64)
                    staged[part.group] = self.setup.streams.stage(numbers)
                blocks = staged[part.group]
                found = part.cache.index_select(0, blocks).view(len(moves), -1)
                if part.dtype in CHECKED:
                    # values that are not finite fail the request that made them; they must not fail later ones
                    good &= found.view(part.dtype).to(CHECKED[part.dtype]).isfinite().all(1)
                buffer[: len(moves), part.start : part.end] = found
            for place, run in self._host(rows):
                run.copy_(buffer[place : place + len(run)], non_blocking=True)
            if finite is not None:
                finite[start : start + len(moves)].copy_(good, non_blocking=True)

    def _host(self, rows: Sequence[int]) -> Sequence[tuple[int, Tensor]]:
        return [] if self._slab is None else list(self._slab.runs(rows))

    def _end_loads(self) -> list[str]:
        """The requests whose loads have ended; blocks of those that failed are named."""
        ended = [copy for copy in self._loading if copy.mark.done()]
        self._loading = [copy for copy in self._loading if copy not in ended]
        for copy in ended:
            self._passed(copy)
            if copy.error is None:
                self._count_copy("load", copy, len(copy.rows))
                self.count("loaded_states", len(copy.states))
                self.count("load_bytes", len(copy.states) * self.states.num_bytes)
            else:
                self.fail([*copy.moves, *(move for move, _ in copy.states)])
            if all(other.number != copy.number for other in self._loading) and copy.number not in self._note.loaded:
                self._note.loaded.append(copy.number)
        told, self._ended = self._ended, []
        return [*told, *(copy.owner for copy in ended)]

    def _end_saves(self) -> None:
        while self._saving and self._saving[0].mark.done():
            copy = self._saving.pop(0)
            self._passed(copy)
            good = copy.finite.tolist() if copy.finite is not None and copy.error is None else [False] * len(copy.rows)
            saved = {place for place, one in zip(copy.places, good, strict=True) if one}
            bad = None if not saved else [place for place in range(copy.total) if place not in saved]
            self._note.saved.append((copy.number, bad))
            self._count_copy("save", copy, len(saved))
            self.count("unsaved_blocks", len(copy.rows) - len(saved))

    def _count_copy(self, name: str, copy: Copy, num_rows: int) -> None:
        self.count(f"{name}_bytes", num_rows * self.tokens.num_bytes)
        if self._first:
            self.count(f"{name}_seconds", time.monotonic() - copy.begun)

    def _passed(self, copy: Copy) -> None:
        try:
            copy.mark.wait()
        except Exception as error:
            copy.error = copy.error or error

    def _wait(self) -> None:
        for copy in (*self._loading, *self._saving):
            self._passed(copy)
        if self._states is not None:
            self._states.wait()
