"""The worker side of the offload connector: copies blocks between the device and host memory, beside the steps.

Loads and saves have a queue each. A block goes through a buffer on the device, in which all its layers lie side by
side, so that it crosses to the host in one piece. Blocks that come to host memory from elsewhere are loaded when they
are there. Knows of a request only its id, and chooses no row.
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

from .block_messages import BlockStep, Move, blocks_name
from .host_slab import HostSlab, check_room
from .offload_messages import Hello, Kind, OffloadNote, OffloadOptions, OffloadStep
from .offload_mover import TierMover
from .row_sums import RowSums
from .shared_slab import SharedSlab
from .shelf import Shelf
from .step_worker import CHECKED, StepWorker

logger = logging.getLogger("frame.connectors.offload")

#: Bytes of the buffer on the device through which each queue copies.
BUFFER_BYTES = 32 << 20
_MOST_ROWS = 256


@dataclass(eq=False)
class Copy:
    """Copies under way: of message `number`, for the request `owner` if they are loads; `moves` with their `rows`.

    `finite` [n] says of saves which hold numbers only, and `sums` [n] are checksums of their rows, once `mark` is
    passed. `places` are those of saves among the `total` of their message, `marks` what the rows are to be known by.
    `error` is what a copy raised.
    """

    number: int
    owner: str
    moves: Sequence[Move]
    rows: Sequence[int]
    places: Sequence[int] = ()
    total: int = 0
    finite: Tensor | None = None
    sums: Tensor | None = None
    marks: Sequence[tuple[bytes, int]] = ()
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
        self._shelf: Shelf | None = None
        if not options.shared:
            check_room(self._share)
        self._options = options
        self._first = self.place == 0
        self._slab: HostSlab | None = None
        self._sums: RowSums | None = None
        self._load_queue: SideQueue = setup.streams.side_queue()
        self._save_queue: SideQueue = setup.streams.side_queue()
        self._load_buffer = self._save_buffer = torch.empty(0)
        self._coming: list[Copy] = []  # loads of rows that come from elsewhere
        self._loading: list[Copy] = []
        self._saving: list[Copy] = []
        self._skipped: list[int] = []  # messages that never came
        self._ended: list[str] = []  # requests whose loads they asked for
        self._told: list[tuple[Kind, int, list[int] | None]] = []  # what has ended since the last report
        self._told_breaks = 0
        self._num_parts = max(1, options.block_size // self.layout.grain)
        self._mover = TierMover(options, self._num_parts, self._rows)
        self._gauges: dict[str, float] = {}

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if not caches:
            self._wait()
        super().register(caches)
        if caches and self._slab is None:
            device = next(iter(caches.values())).bytes.device
            self._slab = self._make_slab(device)
            count = max(1, min(_MOST_ROWS, BUFFER_BYTES // self.block_bytes))
            shape = (count, self.block_bytes)
            self._load_buffer = torch.empty(shape, dtype=torch.uint8, device=device)
            self._save_buffer = torch.empty(shape, dtype=torch.uint8, device=device)

    def handshake(self) -> bytes:
        slab = self._rows()
        return encode(Hello(slab.num_rows, self.block_bytes, self.formats, self._mover.mark(), slab.identity))

    def lost(self, skipped: range, broken: int) -> None:
        self._skipped += skipped
        kinds: tuple[Kind, ...] = ("load", "save", "fetch", "leave")
        self._told += [(kind, number, None) for number in skipped for kind in kinds]
        if broken >= 0:
            self._told.append(("save", broken, None))
        # what the lost messages said of blocks that are given away is not known
        self._save_queue.join()

    def load(self, step: BlockStep) -> None:
        if not isinstance(step, OffloadStep):
            return
        if step.join:
            self._save_queue.join()
        # the scheduler gave up on these loads when their step failed, and keeps their blocks until somebody speaks
        self._ended += [owner for number in self._skipped for owner in step.waiting.get(number, ())]
        self._skipped = []
        self._mover.begin(step.number, self.space, step.fetches, step.leaves)
        by_owner: dict[str, list[int]] = {}
        for place, move in enumerate(step.loads):
            by_owner.setdefault(move.owner, []).append(place)
        for owner, places in by_owner.items():
            rows = [step.load_rows[place] for place in places]
            copy = Copy(step.number, owner, [step.loads[place] for place in places], rows)
            self._coming.append(copy)
        self._start_loads()
        self.count("unsaved_blocks", step.unsaved)
        if self._first:
            self.count("disk_lost_blocks", step.lost)
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
        self._start_loads()
        self._told += self._mover.ended(self.count)
        received = self._end_loads()
        self._end_saves()
        notes = []
        if self._told or self._told_breaks != self._breaks:
            notes.append((self.rank, encode(OffloadNote(self._breaks, self._told))))
        self._told, self._told_breaks = [], self._breaks
        return TransferReport(
            received=received, failed_blocks=self.failed, counters=self._counters, gauges=self._gauges, notes=notes
        )

    def close(self) -> None:
        self._mover.close()
        self._wait()
        self._load_queue.close()
        self._save_queue.close()
        if self._slab is not None:
            self._slab.close()
        if self._shelf is not None:
            self._shelf.close(keep=self._options.keep)

    def _save_sound(self, step: OffloadStep) -> None:
        places = [place for place, move in enumerate(step.saves) if move.owner in self._sound]
        if not places:
            self._told.append(("save", step.number, None))
            self.count("unsaved_blocks", len(step.saves))
            return
        rows = [step.save_rows[place] for place in places]
        copy = Copy(step.number, "", [step.saves[place] for place in places], rows, places, len(step.saves))
        copy.finite = self.setup.memory.pinned(len(places)).view(torch.bool)
        if step.save_marks:
            copy.marks = [step.save_marks[place] for place in places]
            copy.sums = self.setup.memory.pinned(8 * len(places)).view(torch.int64)
        self._run(self._save_queue, copy, self._write)
        self.count("unsaved_blocks", len(step.saves) - len(places))
        self._saving.append(copy)

    def _start_loads(self) -> None:
        """Starts the loads whose rows are there; those of blocks that did not come are over."""
        for copy in list(self._coming):
            moves = [self._mover.coming(row) if row >= 0 else None for row in copy.rows]
            if all(move is None or move.done() for move in moves):
                self._coming.remove(copy)
                lacking = {
                    place
                    for place, (row, move) in enumerate(zip(copy.rows, moves, strict=True))
                    if row < 0 or (move is not None and not move.result().good)
                }
                self.fail([copy.moves[place] for place in lacking])
                there = [place for place in range(len(moves)) if place not in lacking]
                copy.moves, copy.rows = [copy.moves[place] for place in there], [copy.rows[place] for place in there]
                self._run(self._load_queue, copy, self._read)
                self._loading.append(copy)

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
            for part in self._parts:
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

    def _write(self, copy: Copy) -> None:
        """From the blocks of `copy.moves` to host memory."""
        buffer, finite = self._save_buffer, copy.finite
        for start in range(0, len(copy.moves), len(buffer)):
            moves, rows = copy.moves[start : start + len(buffer)], copy.rows[start : start + len(buffer)]
            good = torch.ones(len(moves), dtype=torch.bool, device=buffer.device)
            staged: dict[int, Tensor] = {}  # by KV group, whose layers have the same blocks
            for part in self._parts:
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
            if copy.sums is not None and self._sums is not None:
                copy.sums[start : start + len(moves)].copy_(self._sums(buffer[: len(moves)]), non_blocking=True)
            if finite is not None:
                finite[start : start + len(moves)].copy_(good, non_blocking=True)

    def _make_slab(self, device: torch.device) -> HostSlab:
        options, setup = self._options, self.setup
        if not options.shared:
            return HostSlab(self.block_bytes, self._share, setup.memory.pinned)
        self._sums = RowSums(self.block_bytes, device)
        space = blocks_name(self.layout, setup.mesh)
        self._shelf = Shelf.claim(options.shared_folder, space, setup.engine_id)
        return SharedSlab(self._shelf, self.place, self.formats, self.block_bytes, self._share, device)

    def _rows(self) -> HostSlab:
        if self._slab is None:
            raise RuntimeError("there is no memory yet")
        return self._slab

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
            else:
                self.fail(copy.moves)
            under_way = {other.number for other in (*self._coming, *self._loading)}
            if copy.number not in under_way and ("load", copy.number, []) not in self._told:
                self._told.append(("load", copy.number, []))
        told, self._ended = self._ended, []
        return [*told, *(copy.owner for copy in ended)]

    def _end_saves(self) -> None:
        while self._saving and self._saving[0].mark.done():
            copy = self._saving.pop(0)
            self._passed(copy)
            good = copy.finite.tolist() if copy.finite is not None and copy.error is None else [False] * len(copy.rows)
            saved = {place for place, one in zip(copy.places, good, strict=True) if one}
            if copy.sums is not None:
                for row, (key, generation), row_sum in zip(copy.rows, copy.marks, copy.sums.tolist(), strict=True):
                    self._rows().sign(row, key, generation, row % self._num_parts, row_sum)
            bad = None if not saved else [place for place in range(copy.total) if place not in saved]
            self._told.append(("save", copy.number, bad))
            self._count_copy("save", copy, len(saved))
            self.count("unsaved_blocks", len(copy.rows) - len(saved))

    def _count_copy(self, name: str, copy: Copy, num_rows: int) -> None:
        self.count(f"{name}_bytes", num_rows * self.block_bytes)
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
