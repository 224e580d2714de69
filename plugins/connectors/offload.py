"""The scheduler side of the offload connector: which blocks of prompts host memory holds, and in which rows.

All decisions are made here; workers only copy. A block is written in the step that fills it, and found once every
worker has written it. Blocks of the device that are still read for that when they are given away are named to the
workers (`join`), which then wait. Sees no block's bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frame.interfaces import (
    ConnectorSetup,
    RequestView,
    StepPlan,
    TierPolicySetup,
    TransferReport,
    decode,
)

from .block_messages import BlockStep, Move, state_key
from .block_scheduler import BlockScheduler
from .offload_index import TierIndex
from .offload_messages import Hello, OffloadNote, OffloadOptions, OffloadStep
from .offload_states import StateRows

logger = logging.getLogger("frame.connectors.offload")


@dataclass
class Transfer:
    """What a message asks for, until all workers have done it: `loading` and `saving` are those that have not.

    `loads` are the keys that it reads for each request, `saves` (key, owner) of each part that it writes, of which
    `bad` failed; `blocks` (pool, block) are those of the device that are read for it.
    """

    loads: dict[str, list[bytes]]
    saves: list[tuple[bytes, str]]
    blocks: list[tuple[int, int]]
    loading: int
    saving: int
    bad: set[int] = field(default_factory=set)


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
        self._block_bytes = 0  # of a block of the tier on all workers
        self._num_blocks = 0
        self._index = self._make_index(self._num_blocks, self._parts)
        self._state_bytes = self._num_states = 0  # as of blocks
        self._rows = StateRows(self._make_index(0, 1), 0)
        self._transfers: dict[int, Transfer] = {}  # by the number of their message
        self._used: dict[str, list[bytes]] = {}  # by request: keys of blocks whose loads the next message has
        self._reading = Counter[tuple[int, int]]()  # (pool, block) of the device's blocks that are being saved
        self._held: set[str] = set()  # requests that ended and are being saved
        self._join = False
        self._lookups = self._hits = 0

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        """Raises `ValueError` where not one block has room."""
        hellos = [decode(handshake, Hello) for handshake in handshakes.values()]
        self._num_workers = len(hellos)
        self._block_bytes = sum(hello.row_bytes for hello in hellos) * self._parts
        # a pipeline stage may have no layers that keep tokens, or none that keep states
        rows = [hello.num_rows for hello in hellos if hello.row_bytes]
        self._num_blocks = min(rows, default=0) // self._parts
        size = self._parts * self.layout.grain
        self._state_bytes = sum(hello.state_bytes for hello in hellos)
        self._num_states = min((hello.num_states for hello in hellos if hello.state_bytes), default=0)
        if self._state_bytes and not self._num_states:
            raise ValueError(
                f"{self._options.size:g} GiB of host memory hold no state of a request, which takes "
                f"{self._state_bytes / (1 << 20):.1f} MiB: raise kv_offloading_size"
            )
        if self._block_bytes and not self._num_blocks:
            raise ValueError(
                f"{self._options.size:g} GiB of host memory hold no block of {size} tokens, which take "
                f"{self._block_bytes / (1 << 20):.1f} MiB: raise kv_offloading_size"
            )
        self._index = self._make_index(self._num_blocks, self._parts)
        self._rows = StateRows(self._make_index(self._num_states, 1), self._num_workers)
        logger.info(
            "offloading: %.1f GiB of host memory keep %d blocks of %d tokens%s, policy %s",
            self._size_bytes / (1 << 30),
            self._num_blocks,
            size,
            f" and {self._num_states} states" if self._num_states else "",
            self._options.policy,
        )

    def match(self, request: RequestView, first: int, last: int) -> tuple[int | None, bool]:
        hashes = request.block_hashes

        def has(index: int) -> bool:
            key = self._key(hashes, index)
            return key is not None and self._index.has(key)

        count = self.run(first, last, has, lambda index: self._rows.index.has(state_key(hashes[index])))
        return count, count > 0

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        earlier = len(self._loads)
        super().allocated(request, block_ids, num_external)
        loads = self._loads[earlier:]
        if loads:
            tokens, states = ([move for move in loads if move.state is kind] for kind in (False, True))
            keys = list(dict.fromkeys(key for move in tokens if (key := self._key(request.block_hashes, move.index))))
            self._rows.use(states)
            self._index.use(keys)
            self._used[request.request_id] = self._used.get(request.request_id, []) + keys
        here = self.found_from(request)
        self._lookups += max(0, len(request.block_hashes) - here) * self.layout.grain
        self._hits += num_external

    def build_message(self, plan: StepPlan) -> bytes:
        given = self._given(plan) if self._reading else ()
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
        states, state_rows = self._rows.save(step.number, step.states)
        keys = [self._key(self._hashes.get(move.owner, ()), move.index) for move in loads]
        load_rows = [
            self._index.row(key, move.index % self._parts)
            for key, move in zip(keys, loads, strict=True)
            if key is not None
        ]
        loading = [block for move in loads for block in self._blocks_of(move)]
        join = self._join or any(block in self._reading for block in loading)
        saves, save_rows = self._begin(step.saves)
        used, self._used = self._used, {}
        waiting = {number: list(one.loads) for number, one in self._transfers.items() if one.loading}
        if used or saves:
            self._transfers[step.number] = transfer = Transfer(
                loads=used,
                saves=[(key, move.owner) for key, move in saves],
                blocks=[block for _, move in saves for block in self._blocks_of(move)],
                loading=self._num_workers if used else 0,
                saving=self._num_workers if saves else 0,
            )
            self._reading.update(transfer.blocks)
        lookups, self._lookups = self._lookups, 0
        hits, self._hits = self._hits, 0
        return OffloadStep(
            blocks_name=step.blocks_name,
            number=step.number,
            loads=loads,
            saves=[move for _, move in saves],
            states=states,
            state_rows=state_rows,
            state_loads=state_loads,
            state_load_rows=state_load_rows,
            entered=step.entered,
            known_breaks=step.known_breaks,
            load_rows=load_rows,
            save_rows=save_rows,
            join=join,
            lookups=lookups,
            hits=hits,
            used_bytes=self._index.num_used * self._block_bytes + self._rows.index.num_used * self._state_bytes,
            size_bytes=self._size_bytes,
            waiting=waiting,
        )

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Holds the blocks until they are saved."""
        super().finished(request, block_ids)
        held = self._index.writes(request.request_id)
        if held:
            self._held.add(request.request_id)
        return held, None

    def update(self, report: TransferReport) -> Iterable[str]:
        for rank, data in report.notes:
            note = decode(data, OffloadNote)
            self._breaks[rank] = note.breaks
            for number in note.loaded:
                self._end_loads(number)
            for number, bad in note.saved:
                self._end_saves(number, bad)
            for number, bad in note.states:
                self._rows.saved(number, bad)
        done = [name for name in self._held if not self._index.writes(name)]
        self._held.difference_update(done)
        return done

    def reset(self) -> bool:
        """False while blocks are being loaded. What runs is no longer saved, since its beginning is old."""
        if self._used or self._rows.index.is_read or not self._index.clear():
            return False
        self._rows.index.clear()
        self._prompts.clear()
        return True

    @property
    def _size_bytes(self) -> int:
        return self._num_blocks * self._block_bytes + self._num_states * self._state_bytes

    def _make_index(self, num_blocks: int, parts: int) -> TierIndex:
        if self.setup.make is None:
            raise ValueError("its scheduler side needs a setup that makes tier policies")
        setup = TierPolicySetup(num_blocks=max(1, num_blocks))
        policy = self.setup.make("tier-policy", self._options.policy, setup)
        return TierIndex(num_blocks, parts, policy)

    def _key(self, hashes: Sequence[bytes], index: int) -> bytes | None:
        """The key of the block of the tier with grain `index`; None where the prompt does not fill that block."""
        last = (index // self._parts + 1) * self._parts - 1
        return hashes[last] if last < len(hashes) else None

    def _begin(self, moves: Sequence[Move]) -> tuple[list[tuple[bytes, Move]], list[int]]:
        """Those of `moves` that are to be saved, with their keys, and the rows that they go to."""
        saves, rows = list[tuple[bytes, Move]](), list[int]()
        if len(self._reading) > self.layout.pools[0] // 2:
            return saves, rows  # the host is slower than the device: ended requests must not hold all blocks meanwhile
        for move in moves:
            key = self._key(self._hashes.get(move.owner, ()), move.index)
            if key is None:
                continue
            row = self._index.begin(key, move.index % self._parts, move.owner)
            if row is not None:
                saves.append((key, move))
                rows.append(row)
        return saves, rows

    def _blocks_of(self, move: Move) -> Iterator[tuple[int, int]]:
        for group, blocks in zip(self.layout.groups, move.blocks, strict=True):
            yield from ((group.pool, block) for block in blocks if block)

    def _given(self, plan: StepPlan) -> Iterator[tuple[int, int]]:
        """(pool, block) of the blocks that requests get in this step and may write to."""
        groups = self.layout.groups
        for new in plan.added:
            for group, blocks in zip(groups, new.block_ids, strict=True):
                yield from ((group.pool, block) for block in blocks[new.num_computed // group.block_size :].tolist())
        for append in plan.appends:
            yield from ((groups[append.group].pool, block) for block in append.block_ids.tolist())

    def _end_loads(self, number: int) -> None:
        transfer = self._transfers.get(number)
        if transfer is not None and transfer.loading:
            transfer.loading -= 1
            if not transfer.loading:
                for keys in transfer.loads.values():
                    self._index.release(keys)
                self._rows.loaded(number)
                self._forget(number, transfer)

    def _end_saves(self, number: int, bad: list[int] | None) -> None:
        transfer = self._transfers.get(number)
        if transfer is not None and transfer.saving:
            transfer.saving -= 1
            transfer.bad.update(range(len(transfer.saves)) if bad is None else bad)
            if not transfer.saving:
                for place, (key, owner) in enumerate(transfer.saves):
                    self._index.end(key, owner, good=place not in transfer.bad)
                self._reading.subtract(transfer.blocks)
                self._reading = +self._reading
                self._forget(number, transfer)

    def _forget(self, number: int, transfer: Transfer) -> None:
        if not (transfer.loading or transfer.saving):
            del self._transfers[number]
