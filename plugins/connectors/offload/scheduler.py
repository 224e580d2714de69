"""The scheduler side of the offload connector: which blocks of prompts host memory holds, and in which rows.

All decisions are made here; workers only copy. A block is written in the step that fills it, and found once every
worker has written it. Blocks of the device that are still read for that when they are given away are named to the
workers (`join`), which then wait. Blocks that host memory soon needs the room of go to the disk, if there is one, and
come back to host memory before they are loaded. Sees no block's bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from frame.interfaces import (
    ConnectorSetup,
    RequestView,
    StepPlan,
    TierPolicy,
    TierPolicySetup,
    TransferReport,
    decode,
)

from ..blocks.messages import BlockStep, Move, state_key
from ..blocks.scheduler import BlockScheduler
from .checked_policy import CheckedPolicy, NothingHeld
from .device_blocks import blocks_of, given_blocks
from .disk import DiskTier, NoDisk
from .disk_forms import VERSION, EngineForms, WorkerForm
from .index import Ledger, TierIndex
from .messages import Fetch, Hello, Kind, OffloadNote, OffloadStep
from .neighbours import NoNeighbours
from .options import OffloadOptions
from .row_forms import mesh_name, space_name
from .rows_file import STATES
from .shelf import Shelf
from .shelves import shelve
from .sizes import TierSizes, num_free
from .state_rows import STATE_KINDS, StateRows
from .tier_sources import TierSources
from .transfers import Transfer, Transfers

logger = logging.getLogger("frame.connectors.offload")


class OffloadScheduler(BlockScheduler):
    """See the module."""

    title = "offload"

    def __init__(self, setup: ConnectorSetup, options: OffloadOptions) -> None:
        super().__init__(setup, options)
        grain, size = self.layout.grain, options.block_size or self.layout.grain
        if size % grain:
            raise ValueError(f"its block_size is {size}, and must be a multiple of {grain}, what blocks here hold")
        self._options = options
        self._parts = size // grain
        self._num_workers = 0
        self._sizes = TierSizes()
        self._index = self._make_index(0, self._parts)
        self._rows = StateRows(self._make_index(0, 1), 0, NoNeighbours(), NoDisk())
        self._shelf = (
            Shelf.claim(
                options.shared_folder, space_name(self.layout, self._parts), setup.engine_id, mesh_name(setup.mesh)
            )
            if options.shared
            else None
        )
        self._neighbours = NoNeighbours()
        self._disk = NoDisk() if options.disk is None else DiskTier(options, self._parts, self.layout)
        self._sources = TierSources(self._index, self._neighbours, self._disk)
        self._transfers = Transfers()
        self._fetches: list[Fetch] = []  # that the next message has
        self._used: dict[str, list[bytes]] = {}  # by request: keys of blocks whose loads the next message has
        self._reading = Counter[tuple[int, int]]()  # (pool, block) of the device's blocks that are being saved
        self._held: set[str] = set()  # requests that ended and are being saved
        self._join = False
        self._lookups = self._hits = self._unsaved = 0

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        """Raises `ValueError` where not one block has room."""
        by_rank = {rank: decode(handshake, Hello) for rank, handshake in handshakes.items()}
        hellos = list(by_rank.values())
        super().connect({rank: hello.formats.encode() for rank, hello in by_rank.items()})
        disk = self._connect_disk(by_rank)
        self._num_workers = len(hellos)
        sizes = self._sizes = TierSizes.of(hellos, self._parts)
        sizes.check(self._options, self._parts * self.layout.grain)
        self._index = self._make_index(sizes.num_blocks, self._parts)
        self._rows = self._make_rows(self._make_index(sizes.num_states, 1), NoNeighbours(), disk)
        if self._shelf is not None:
            self._share(self._shelf, by_rank, disk)
        self._sources = TierSources(self._index, self._neighbours, self._disk)
        logger.info(
            "offloading: %.4g GiB of host memory keep %d blocks of %d tokens%s, policy %s%s",
            sizes.size_bytes / (1 << 30),
            sizes.num_blocks,
            self._parts * self.layout.grain,
            f" and {sizes.num_states} states" if sizes.num_states else "",
            self._options.policy,
            "" if self._shelf is None else f"; {self._adopted} of them are there from an engine before this one",
        )

    def match(self, request: RequestView, first: int, last: int) -> tuple[int | None, bool]:
        keys = self._keys(request.block_hashes, first, last) if self._keeps_tokens else []
        found = self._sources.found(request.request_id, keys)
        if found is None:
            return None, False
        if self._keeps_tokens:
            last = min(last, (first // self._parts + found) * self._parts) if found else first
        if self._states and first < last:
            states = self._rows.found(request.request_id, [state_key(one) for one in request.block_hashes[first:last]])
            if states is None:
                return None, False
            last = first + states
        count = max(0, last - first) * self.layout.grain
        return count, count > 0

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        earlier = len(self._loads)
        super().allocated(request, block_ids, num_external)
        loads = self._loads[earlier:]
        if loads:
            tokens, states = ([move for move in loads if move.state is kind] for kind in (False, True))
            keys = list(dict.fromkeys(key for move in tokens if (key := self._key(request.block_hashes, move.index))))
            self._rows.use(request.request_id, states)
            self._fetches += self._sources.bring(request.request_id, keys)
            keys = [key for key in keys if self._index.knows(key)]
            self._index.use(keys)
            self._used[request.request_id] = self._used.get(request.request_id, []) + keys
        self._disk.forget(request.request_id)
        self._rows.forget(request.request_id)
        here = self.found_from(request)
        self._lookups += max(0, len(request.block_hashes) - here) * self.layout.grain
        self._hits += num_external

    def build_message(self, plan: StepPlan) -> bytes:
        given = given_blocks(self.layout, plan) if self._reading else ()
        self._join = any(block in self._reading for block in given)
        message = super().build_message(plan)
        running = {prompt.request_id for prompt in self._prompts.values()}
        self._index.settle(running)
        self._rows.settle(running)
        return message

    @property
    def waits(self) -> bool:
        return bool(self._transfers) or self._rows.waits

    def message(self, step: BlockStep) -> OffloadStep:
        """Chooses the rows; saves that get none are left out."""
        loads, state_loads = ([move for move in step.loads if move.state is kind] for kind in (False, True))
        state_load_rows = self._rows.rows(step.number, state_loads)
        states, state_fetches, state_leaves = self._rows.begin(step.number, step.states)
        load_rows = [
            self._index.row(self._key(self._hashes.get(move.owner, ()), move.index), move.index % self._parts)
            for move in loads
        ]
        join = self._join or any(block in self._reading for block in blocks_of(self.layout, loads))
        saves, save_rows = self._begin(step.saves)
        used, self._used = self._used, {}
        fetches, self._fetches = self._fetches, []
        free = self._num_free(self._sizes.num_blocks, self._parts)
        leaves = [self._sources.fetch(key, self._index.row(key, 0)) for key in self._index.leave(free)]
        waiting = self._transfers.loading()
        transfer = Transfer(
            loads=used,
            saves=[(key, move.owner) for key, move in saves],
            blocks=blocks_of(self.layout, [move for _, move in saves]),
            fetches=[fetch.key for fetch in fetches],
            leaves=[leave.key for leave in leaves],
        )
        self._transfers.begin(step.number, transfer, self._num_workers)
        self._reading.update(transfer.blocks)
        lookups, self._lookups = self._lookups, 0
        hits, self._hits = self._hits, 0
        unsaved, self._unsaved = self._unsaved, 0
        lost, self._index.dropped = self._index.dropped, 0
        return OffloadStep(
            blocks_name=step.blocks_name,
            number=step.number,
            loads=loads,
            saves=[move for _, move in saves],
            states=states.moves,
            state_rows=states.rows,
            state_marks=states.marks if self._shelf is not None else [],
            state_loads=state_loads,
            state_load_rows=state_load_rows,
            state_fetches=state_fetches,
            state_leaves=state_leaves,
            entered=step.entered,
            known_breaks=step.known_breaks,
            load_rows=load_rows,
            save_rows=save_rows,
            save_marks=self._marks([key for key, _ in saves], save_rows),
            join=join,
            lookups=lookups,
            hits=hits,
            used_bytes=self._index.num_used * self._sizes.block_bytes
            + self._rows.index.num_used * self._sizes.state_bytes,
            size_bytes=self._sizes.size_bytes,
            waiting=waiting,
            fetches=fetches,
            leaves=leaves,
            unsaved=unsaved,
            lost=(lost if free else 0) + self._rows.lost(),
        )

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Holds the blocks until they and the states are saved: without further steps nobody hears that they are."""
        super().finished(request, block_ids)
        self._disk.forget(request.request_id)
        self._rows.forget(request.request_id)
        held = self._writes(request.request_id)
        if held:
            self._held.add(request.request_id)
        return held, None

    def update(self, report: TransferReport) -> Iterable[str]:
        for rank, data in report.notes:
            note = decode(data, OffloadNote)
            self._breaks[rank] = note.breaks
            for kind, number, bad in note.ended:
                if kind in STATE_KINDS:
                    self._rows.end(kind, number, bad)
                    continue
                transfer = self._transfers.end(number, kind, bad)
                if transfer is not None:
                    self._end(kind, number, transfer, transfer.bad.get(kind, set()))
        done = [name for name in self._held if not self._writes(name)]
        self._held.difference_update(done)
        return done

    def reset(self) -> bool:
        """False while blocks are being loaded. What runs is no longer saved, since its beginning is old."""
        if self._used or self._rows.index.is_read or not self._index.clear():
            return False
        self._rows.clear(self.blocks_name)
        self._prompts.clear()
        leaving = [key for one in self._transfers if "leave" in one.pending for key in one.leaves]
        self._disk.clear(self.blocks_name, leaving)
        self._neighbours.forget()
        return True

    def close(self) -> None:
        self._disk.close()
        self._neighbours.close()
        self._index.close()
        self._rows.close()
        if self._shelf is not None:
            self._shelf.close(keep=self._options.keep)

    @property
    def _adopted(self) -> str:
        """How much of what a shelf held was taken over, as the log says it at the start."""
        states = f" and {self._rows.index.num_used}" if self._sizes.num_states else ""
        return f"{self._index.num_used}{states}"

    def _writes(self, request_id: str) -> bool:
        return self._index.writes(request_id) or self._rows.index.writes(request_id)

    def _num_free(self, num_slots: int, parts: int) -> int:
        return num_free(self._options, num_slots, self.setup.max_num_batched_tokens // (parts * self.layout.grain))

    def _connect_disk(self, hellos: Mapping[int, Hello]) -> NoDisk:
        """The disk for states; each looks for files of those workers that have such rows."""
        marks, ranked = {rank: hello.mark for rank, hello in hellos.items()}, [one for _, one in sorted(hellos.items())]
        states = NoDisk() if self._options.disk is None else DiskTier(self._options, 1, self.layout, STATES)
        for disk, rows in ((self._disk, [one.tokens for one in ranked]), (states, [one.states for one in ranked])):
            spaces = [space for space, one in zip(self.spaces, rows, strict=True) if one.row_bytes]
            forms = [WorkerForm(one.formats, own.form) for one, own in zip(ranked, rows, strict=True)]
            disk.connect(spaces, marks if disk is self._disk else {}, self.blocks_name, EngineForms(VERSION, forms))
        return states

    def _make_rows(self, index: TierIndex, neighbours: NoNeighbours, disk: NoDisk) -> StateRows:
        return StateRows(index, self._num_workers, neighbours, disk, self._num_free(self._sizes.num_states, 1))

    def _share(self, shelf: Shelf, hellos: Mapping[int, Hello], disk: NoDisk) -> None:
        """Has the shelf say what the slots hold, and takes over what is there; `disk` is that of states."""
        shelf.lead()
        blocks, states = self._sizes.num_blocks, self._sizes.num_states
        if blocks:
            make = partial(self._make_index, blocks, self._parts)
            self._index, self._neighbours = shelve(shelf, hellos, blocks, make, states=False)
        if states:
            make = partial(self._make_index, states, 1)
            self._rows = self._make_rows(*shelve(shelf, hellos, states, make, states=True), disk)

    def _make_index(self, num_blocks: int, parts: int, ledger: Ledger | None = None) -> TierIndex:
        return TierIndex(num_blocks, parts, partial(self._make_policy, num_blocks), ledger)

    def _make_policy(self, num_blocks: int, held: Set[bytes]) -> TierPolicy:
        make, name, setup = self.setup.make, self._options.policy, TierPolicySetup(num_blocks=num_blocks)
        if make is None:
            raise ValueError("its scheduler side needs a setup that makes tier policies")
        if not num_blocks:
            return NothingHeld(setup)
        policy = make("tier-policy", name, setup)
        return CheckedPolicy(setup, policy, name, held, partial(make, "tier-policy", "frame-llm:lru", setup))

    def _key(self, hashes: Sequence[bytes], index: int) -> bytes | None:
        """The key of the block of the tier with grain `index`; None where the prompt does not fill that block."""
        last = (index // self._parts + 1) * self._parts - 1
        return hashes[last] if last < len(hashes) else None

    def _keys(self, hashes: Sequence[bytes], first: int, last: int) -> list[bytes]:
        """The keys of the tier's blocks that hold the grains [first, last), up to one that the prompt does not fill."""
        keys = []
        for index in range(first // self._parts, -(-last // self._parts)):
            key = self._key(hashes, index * self._parts)
            if key is None:
                break
            keys.append(key)
        return keys

    def _marks(self, keys: list[bytes], rows: list[int]) -> list[tuple[bytes, int]]:
        if self._shelf is None:
            return []
        return [(key, self._index.generation(row)) for key, row in zip(keys, rows, strict=True)]

    def _begin(self, moves: Sequence[Move]) -> tuple[list[tuple[bytes, Move]], list[int]]:
        """Those of `moves` that are to be saved, with their keys, and the rows that they go to."""
        saves, rows = list[tuple[bytes, Move]](), list[int]()
        if len(self._reading) > self.layout.pools[0] // 2:
            # the host is slower than the device: ended requests must not hold all blocks meanwhile
            self._unsaved += sum(not self._stored(move) for move in moves)
            return saves, rows
        for move in moves:
            key = self._key(self._hashes.get(move.owner, ()), move.index)
            if key is None:
                continue
            row = self._index.begin(key, move.index % self._parts, move.owner)
            if row is not None:
                saves.append((key, move))
                rows.append(row)
        return saves, rows

    def _stored(self, move: Move) -> bool:
        key = self._key(self._hashes.get(move.owner, ()), move.index)
        return key is None or self._index.knows(key)

    def _end(self, kind: Kind, number: int, transfer: Transfer, bad: Container[int]) -> None:
        """All workers have done what a message asked for, but for the places `bad`."""
        match kind:
            case "load":
                for keys in transfer.loads.values():
                    self._index.release(keys)
                self._rows.loaded(number)
            case "save":
                for place, (key, owner) in enumerate(transfer.saves):
                    self._index.end(key, owner, good=place not in bad)
                self._reading.subtract(transfer.blocks)
                self._reading = +self._reading
            case "fetch":
                for place, key in enumerate(transfer.fetches):
                    self._index.brought(key, good=place not in bad)
            case "leave":
                for key in transfer.leaves:
                    self._index.left(key)
                    self._disk.left(key)
