"""The worker side of the offload connector: copies blocks between the device and host memory, beside the steps.

Loads and saves have a queue each. Blocks that come to host memory from elsewhere are loaded when they are there. Knows
of a request only its id, and chooses no row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import get_args

import torch

from frame.interfaces import CacheView, ConnectorWorkerSetup, SideQueue, TransferReport, encode

from ..blocks.host_slab import HostSlab, check_room
from ..blocks.messages import BlockStep, Move
from ..blocks.step_worker import StepWorker
from .disk import files_of
from .disk_forms import DiskForms
from .foreign_files import ForeignFiles
from .foreign_rows import write_form
from .loads import ComingLoads
from .messages import Hello, Kind, OffloadNote, OffloadStep, Rows
from .mover import Store, TierMover
from .options import OffloadOptions
from .row_copies import Copy, RowCopies
from .row_forms import RowForm, form_of, mesh_name, space_name, state_form
from .rows_file import STATES
from .shared_slab import SharedSlab
from .shelf import Shelf
from .states import StateCopies, share_of_states

logger = logging.getLogger("frame.connectors.offload")


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
        self._first = self.rank == 0
        self._slab: HostSlab | None = None
        self._states: StateCopies | None = None
        self._load_queue: SideQueue = setup.streams.side_queue()
        self._save_queue: SideQueue = setup.streams.side_queue()
        self._copies: RowCopies | None = None
        self._forms = {"": RowForm(0, []), STATES: RowForm(0, [])}  # of rows of tokens and of states
        self._others: dict[str, ForeignFiles] = {}
        self._loading: list[Copy] = []
        self._saving: list[Copy] = []
        self._begun = -1  # the newest message of which what comes to host memory, or leaves it, was begun
        self._skipped: list[int] = []  # messages that never came
        self._ended: list[str] = []  # requests whose loads they asked for
        self._told: list[tuple[Kind, int, list[int] | None]] = []  # what has ended since the last report
        self._told_breaks = 0
        self._num_parts = max(1, options.block_size // self.layout.grain)
        self._mover = TierMover(
            options,
            Store(self._num_parts, lambda: self._slab, lambda: self._others.get("")),
            Store(1, lambda: None if self._states is None else self._states.slab, lambda: self._others.get(STATES)),
        )
        self._coming = ComingLoads(self._mover, self.fail)
        self._gauges: dict[str, float] = {}

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if not caches:
            self._wait()
        super().register(caches)
        if caches and self._slab is None and self._states is None:
            device, states = next(iter(caches.values())).bytes.device, share_of_states(self.layout, self._share)
            owner = f"worker {self.rank} of {mesh_name(self.setup.mesh)}"
            if states:
                form = state_form(self.states, caches, owner)
                self._states = StateCopies(self.setup, self.states, self._make_slab(device, form, states, STATES))
            form = form_of(self.tokens.parts, caches, owner)
            self._slab = self._make_slab(device, form, self._share - states, "")
            if self._slab is not None:
                self._copies = RowCopies(self._slab, device, self.setup.streams)
                self._copies.parts = self.tokens.parts
                self._copies.compile()
        if self._copies is not None:
            self._copies.parts = self.tokens.parts
        if self._states is not None:
            self._states.stored = self.states

    def handshake(self) -> bytes:
        states = None if self._states is None else self._states.slab
        tokens, kept = (
            Rows() if slab is None else Rows(slab.num_rows, slab.row_bytes, slab.identity, self._forms[kind])
            for slab, kind in ((self._slab, ""), (states, STATES))
        )
        return encode(Hello(tokens, kept, self.formats, self._mover.mark()))

    def lost(self, skipped: range, broken: int) -> None:
        self._skipped += skipped
        self._told += [(kind, number, None) for number in skipped for kind in get_args(Kind)]
        if broken >= 0:
            self._told.append(("save", broken, None))
            if self._begun != broken:
                others = [kind for kind in get_args(Kind) if kind not in ("save", "save state")]
                self._told += [(kind, broken, None) for kind in others]
            if self._states is not None and self._states.begun != broken:
                self._told.append(("save state", broken, None))
        # what the lost messages said of blocks that are given away is not known
        self._save_queue.join()

    def pending_loads(self) -> list[str]:
        return [*self._coming.owners, *(copy.owner for copy in self._loading)]

    def save_states(self, moves: Sequence[Move]) -> None:
        if isinstance(self._step, OffloadStep) and self._states is not None:
            self._states.save(self._step, self._sound)

    def load(self, step: BlockStep) -> None:
        if not isinstance(step, OffloadStep):
            return
        if step.join:
            self._save_queue.join()
        # the scheduler gave up on these loads when their step failed, and keeps their blocks until somebody speaks
        self._ended += [owner for number in self._skipped for owner in step.waiting.get(number, ())]
        self._skipped = []
        self._begun = step.number
        self._mover.begin(step, self.space)
        self._coming.add(step)
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
        if self._states is not None:
            count, unsaved, seconds = self._states.end()
            self.count("saved_states", count)
            self.count("unsaved_states", unsaved)
            self.count("save_bytes", count * self.states.num_bytes)
            self.count("save_seconds", seconds if self._first else 0)
            self._told += [("save state", number, bad) for number, bad in self._states.saved]
            self._states.saved = []
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
        if self._states is not None:
            self._states.close()
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
        for copy in self._coming.ready():
            self._loading.append(copy)  # first: what raises may have begun it
            self._run(self._load_queue, copy, self._read)

    def _run(self, queue: SideQueue, copy: Copy, work: Callable[[Copy], None]) -> None:
        try:
            queue.run(partial(self._tried, copy, work))
            copy.mark = queue.mark()
        except Exception as error:
            copy.error = error
            raise

    def _tried(self, copy: Copy, work: Callable[[Copy], None]) -> None:
        try:
            with torch.inference_mode():
                work(copy)
        except Exception as error:
            logger.exception("blocks could not be copied")
            copy.error = error

    def _read(self, copy: Copy) -> None:
        """From host memory to the blocks of `copy.moves`, and the states."""
        if self._copies is not None:
            self._copies.read(copy)
        for move, row in copy.states:
            if self._states is not None:
                self._states.load(move, row)

    def _write(self, copy: Copy) -> None:
        """From the blocks of `copy.moves` to host memory."""
        if self._copies is not None:
            self._copies.write(copy)
        elif copy.finite is not None:
            copy.finite.fill_(True)  # this stage of a pipeline keeps no tokens

    def _make_slab(self, device: torch.device, form: RowForm, num_bytes: int, kind: str) -> HostSlab | None:
        """Rows of a form; None where this stage of a pipeline keeps nothing of that kind."""
        options, setup = self._options, self.setup
        self._forms[kind] = form
        if options.disk is not None and form.row_bytes:
            files = files_of(options)
            forms = DiskForms(files, space_name(self.layout, 1 if kind else self._num_parts), kind)
            self._others[kind] = ForeignFiles(files, forms, form)
        if not options.shared:
            return HostSlab(form.row_bytes, num_bytes, setup.memory.pinned) if form.row_bytes else None
        if self._shelf is None:
            space = space_name(self.layout, self._num_parts)
            self._shelf = Shelf.claim(options.shared_folder, space, setup.engine_id, mesh_name(setup.mesh))
            self._shelf.work(self.rank)
        if not form.row_bytes:
            write_form(self._shelf, self.rank, form, kind)
            return None
        return SharedSlab(self._shelf, self.rank, form, self.formats, num_bytes, device, kind)

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
            under_way = self._coming.numbers | {other.number for other in self._loading}
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
            if copy.sums is not None and self._slab is not None:
                for row, (key, generation), row_sum in zip(copy.rows, copy.marks, copy.sums.tolist(), strict=True):
                    self._slab.sign(row, key, generation, row % self._num_parts, row_sum)
            bad = None if not saved else [place for place in range(copy.total) if place not in saved]
            self._told.append(("save", copy.number, bad))
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
