"""A worker without a model: its KV cache holds facts, so a block that is wrong, late or lost changes the tokens.

Each cached token is written as numbers that stand for its whole prefix, in every layer. The next token is a function of
the prefix, unless one of the entries that it depends on is not what it should be. For tests of executors, connectors
and policies; knows no device.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.attention import BlockFormat, GroupBatch
from frame.core.interfaces.connector import CacheView, ConnectorWorker, NullConnectorWorker
from frame.core.interfaces.executor import Executor, StepHandle, WorkerDescription, WorkerFacts, WorkerReady
from frame.core.interfaces.kv import FullKV, KVGroup, KVLayout, SlidingKV
from frame.core.interfaces.kv_layout import pool_bytes
from frame.core.interfaces.mesh import Placement
from frame.core.interfaces.step import NewRequest, StepPlan, StepResult
from frame.core.worker.step.runner import CONNECTOR, NO_HOOKS

from .setups import make_setup

#: Drawn tokens lie below; this one is what a wrong entry leads to.
VOCAB = 100
WRONG_TOKEN = VOCAB - 1
_HEADS, _HEAD_DIM = 1, 4


class BrokenStepError(RuntimeError):
    """A step that was told to raise."""


def make_layout(
    num_blocks: int = 64,
    block_size: int = 4,
    windows: Sequence[int] = (0,),
    layers: int = 2,
    *,
    strides: Sequence[int] = (),
    model: str = "test",
) -> KVLayout:
    """A KV cache of small blocks; one group for each window (0 is a full one), each of that many layers.

    `strides[g]` times `block_size` tokens are in a block of group g; without them every block has `block_size`.
    """
    groups = []
    strides = strides or [1] * len(windows)
    for index, window in enumerate(windows):
        spec = (
            SlidingKV(num_kv_heads=_HEADS, head_dim=_HEAD_DIM, dtype="float32", window=window)
            if window
            else FullKV(num_kv_heads=_HEADS, head_dim=_HEAD_DIM, dtype="float32")
        )
        names = tuple(f"group{index}.layer{layer}" for layer in range(layers))
        groups.append(KVGroup(specs=(spec,) * layers, layers=names, block_size=block_size * strides[index]))
    return KVLayout(
        groups=tuple(groups),
        pools=(num_blocks,),
        block_size=block_size,
        grain=block_size * math.lcm(*strides),
        numerics=f"{model} in float32",
        model=model,
    )


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What an undisturbed worker continues a prompt with."""
    prefix = 0
    for token in prompt:
        prefix = _extend(prefix, token)
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(_next(prefix, seed))
        prefix = _extend(prefix, tokens[-1])
    return tokens


def _extend(prefix: int, token: int) -> int:
    return zlib.crc32(f"{prefix},{token}".encode())


def _next(prefix: int, seed: int) -> int:
    return zlib.crc32(f"{prefix}:{seed}".encode()) % WRONG_TOKEN


@dataclass
class Resident:
    """A request in a slot: its tokens, the number that stands for each prefix, its blocks by group."""

    tokens: list[int]
    prefixes: list[int]
    tables: list[list[int]]
    seed: int

    @classmethod
    def of(cls, new: NewRequest) -> Resident:
        """The state of a request that enters."""
        made = cls([], [], [blocks.tolist() for blocks in new.block_ids], new.seed)
        for token in new.token_ids.tolist():
            made.append(token)
        return made

    def append(self, token: int) -> None:
        """One more token."""
        self.tokens.append(token)
        self.prefixes.append(_extend(self.prefixes[-1] if self.prefixes else 0, token))

    def extend(self, group: int, offset: int, block: int) -> None:
        """Block `offset` of a group."""
        table = self.tables[group]
        table.extend([0] * (offset + 1 - len(table)))
        table[offset] = block


@dataclass
class FakeHandle:
    """A step that is done: its result, or what it raised."""

    outcome: StepResult | BaseException

    def ready(self) -> bool:
        """Always."""
        return True

    def results(self) -> list[StepResult]:
        """The one result, or raises what the step raised."""
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return [self.outcome]


@dataclass
class FakeWorker:
    """Implements `WorkerProtocol`. `connector(layout)` makes the worker side of a connector.

    Steps numbered in `broken_steps` raise in the middle of the forward pass. `calls` records every call by name;
    `dead` makes `check` raise, `start_error` makes `load` raise.
    """

    layout: KVLayout = field(default_factory=make_layout)
    connector: Callable[[KVLayout], ConnectorWorker] | None = None
    broken_steps: Collection[int] = ()
    rank: int = 0
    dead: bool = False
    start_error: str | None = None
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots: dict[int, Resident] = {}
        self.closed = False
        self.transfer: ConnectorWorker = NullConnectorWorker(make_setup("connector", part="worker", layout=self.layout))
        self._executed: StepResult | BaseException | None = None

    def load(self) -> WorkerFacts:
        """The facts of its layout."""
        self.calls.append("load")
        if self.start_error is not None:
            raise RuntimeError(self.start_error)
        layout = self.layout
        return WorkerFacts(
            kv_specs={
                layer: spec for group in layout.groups for layer, spec in zip(group.layers, group.specs, strict=True)
            },
            kv_bytes=layout.pools[0] * pool_bytes(layout)[0],
            pool_bytes=pool_bytes(layout),
            digest=layout.numerics,
            model=layout.model,
            described=WorkerDescription(platform="fake", dtype="float32", attention=["fake"]),
        )

    def allocate(self, layout: KVLayout) -> WorkerReady:
        """Allocates the cache; registers it with the connector."""
        self.calls.append("allocate")
        self.layout = layout
        self.caches: dict[str, Tensor] = {
            layer: torch.zeros(layout.pools[group.pool], spec.block_bytes(group.block_size), dtype=torch.uint8)
            for group in layout.groups
            for layer, spec in zip(group.layers, group.specs, strict=True)
        }
        if self.connector is not None:
            self.transfer = self.connector(self.layout)
        self.transfer.register(self._views())
        return WorkerReady(handshake=self.transfer.handshake())

    def execute(self, plan: StepPlan) -> None:
        """Applies the plan; as on a device, a step that breaks leaves its state changes in place."""
        self.calls.append("execute")
        self._executed = None
        self._change_state(plan)
        self.transfer.begin_step(plan.extras.get(CONNECTOR, b""))
        sound = self._forward(plan) if len(plan.slots) else []
        if plan.step in self.broken_steps:
            raise BrokenStepError(f"step {plan.step} was told to break")
        report = self.transfer.end_step(plan.finished_ids)
        tokens = np.full((len(plan.slots), 1), -1, np.int32)
        for row, slot in enumerate(plan.slots.tolist()):
            if plan.samples[row]:
                resident = self.slots[slot]
                token = _next(resident.prefixes[-1], resident.seed) if sound[row] else WRONG_TOKEN
                resident.append(token)
                tokens[row, 0] = token
        counts = plan.samples.astype(np.int32)
        self._executed = StepResult(step=plan.step, token_ids=tokens, num_tokens=counts, transfer=report)

    def sample(self, masks: bytes = b"") -> FakeHandle:
        """The step executed last; masks are ignored."""
        del masks
        self.calls.append("sample")
        executed, self._executed = self._executed, None
        if executed is None:
            raise RuntimeError("there is no executed step to sample")
        return FakeHandle(executed)

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """`describe` and `echo`; anything else raises `ValueError`."""
        self.calls.append(f"call {method}")
        if method == "describe":
            return {"platform": "fake", "attention": ["fake"], "dtype": "float32", "stages": [], "rank": self.rank}
        if method == "echo":
            return arguments
        raise ValueError(f"no worker method {method!r}; there are: describe, echo")

    def check(self) -> None:
        """Raises when the worker was declared dead."""
        if self.dead:
            raise RuntimeError(f"worker {self.rank} is dead")

    def close(self) -> None:
        """Closes the connector, once."""
        self.calls.append("close")
        if not self.closed:
            self.transfer.close()
        self.closed = True

    def _change_state(self, plan: StepPlan) -> None:
        for slot in plan.removed_slots.tolist():
            self.slots.pop(slot, None)
        for new in plan.added:
            self.slots[new.slot] = Resident.of(new)
        for append in plan.appends:
            columns = (append.slots, append.offsets, append.block_ids)
            for slot, offset, block in zip(*(column.tolist() for column in columns), strict=True):
                self.slots[slot].extend(append.group, offset, block)

    def _views(self) -> dict[str, CacheView]:
        """The caches, as connectors get them."""
        views: dict[str, CacheView] = {}
        for index, group in enumerate(self.layout.groups):
            block = BlockFormat((2, group.block_size, _HEADS, _HEAD_DIM), (0, 1, 2, 3), torch.float32, 1)
            views |= {layer: CacheView(self.caches[layer], block, index) for layer in group.layers}
        return views

    def _forward(self, plan: StepPlan) -> list[bool]:
        """Writes and reads every layer, hooks around it; for each row whether all that it read was right."""
        sound = [True] * len(plan.slots)
        batch = _batch_of(plan)
        several = batch.max_query_len > 1 or self.transfer.hooks.decode_steps
        hooks = self.transfer.hooks if several else NO_HOOKS
        for index, group in enumerate(self.layout.groups):
            for number, layer in enumerate(group.layers):
                hooks.before(layer, batch)
                wanted = [self._write(layer, index, number, plan, row) for row in range(len(plan.slots))]
                # all of a layer is written before it is read: rows of one step may share a prefix
                for row, (table, want) in enumerate(wanted):
                    first = group.specs[0].first_needed(int(plan.num_computed[row]))
                    read = self._entries(layer, group.block_size, table, len(want))[first:]
                    sound[row] &= bool((read == want[first:]).all())
                hooks.after(layer, batch)
                if plan.step in self.broken_steps:
                    return sound
        return sound

    def _write(self, layer: str, group: int, number: int, plan: StepPlan, row: int) -> tuple[list[int], Tensor]:
        """Stores a row's new entries in a layer; its block table, and what all its entries [n, 1] should then be."""
        resident = self.slots[int(plan.slots[row])]
        start, end = int(plan.num_computed[row]), int(plan.num_computed[row] + plan.num_scheduled[row])
        while len(resident.tokens) < end:
            resident.append(WRONG_TOKEN)  # its token was lost with a broken step
        numbers = np.array(resident.prefixes[:end], np.float64) % 65536 + number * 65536
        want = torch.from_numpy(numbers.astype(np.float32))[:, None]
        table = resident.tables[group]
        size = self.layout.groups[group].block_size
        entries = self._entries(layer, size, table, end)
        entries[start:] = want[start:]
        self._store(layer, size, table, entries, start)
        return table, want

    def _entries(self, layer: str, size: int, table: Sequence[int], count: int) -> Tensor:
        """A copy of the entries [count, numbers] of a request's first tokens in a layer, in blocks of `size`."""
        blocks = list(table[: -(-count // size)])
        return self.caches[layer][blocks].view(torch.float32).reshape(len(blocks) * size, -1)[:count].clone()

    def _store(self, layer: str, size: int, table: Sequence[int], entries: Tensor, start: int) -> None:
        cache = self.caches[layer].view(torch.float32).view(len(self.caches[layer]), size, -1)
        for position in range(start, len(entries)):
            cache[table[position // size], position % size] = entries[position]


class FakeExecutor(Executor):
    """One worker, called directly."""

    def load(self) -> list[WorkerFacts]:
        self.worker = self.workers.local(self.setup.placements[0])
        return [self.worker.load()]

    def allocate(self, layout: KVLayout) -> list[WorkerReady]:
        return [self.worker.allocate(layout)]

    def execute(self, plan: StepPlan) -> None:
        self.worker.execute(plan)

    def sample(self, masks: bytes = b"") -> StepHandle:
        return self.worker.sample(masks)

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        return [self.worker.call(method, arguments, timeout)]

    def close(self) -> None:
        self.worker.close()


class FakeWorkers:
    """Implements `WorkerFactory` with workers of this process, local or not; `made` holds them in order."""

    def __init__(self, make: Callable[[int], FakeWorker] = lambda rank: FakeWorker(rank=rank)) -> None:
        self._make = make
        self.made: list[FakeWorker] = []

    def local(self, placement: Placement) -> FakeWorker:
        """A worker."""
        self.made.append(self._make(placement.rank))
        return self.made[-1]

    def spawn(self, placement: Placement) -> FakeWorker:
        """The same: where a fake worker lives makes no difference."""
        return self.local(placement)

    def recipe(self, placement: Placement) -> bytes:
        """Fake workers live in this process only."""
        raise NotImplementedError(f"fake worker {placement.rank} cannot be made in another process")


def _batch_of(plan: StepPlan) -> GroupBatch:
    """What hooks are told of a step: the lengths of its rows; the tables are of no block."""
    query_lens = np.asarray(plan.num_scheduled, np.int32)
    seq_lens = query_lens + np.asarray(plan.num_computed, np.int32)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    return GroupBatch(
        num_tokens=int(query_lens.sum()),
        query_start=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(seq_lens),
        block_table=torch.zeros(len(seq_lens), 0, dtype=torch.int32),
        slot_mapping=torch.full((int(query_lens.sum()),), -1, dtype=torch.int64),
        host_query_lens=query_lens,
        host_seq_lens=seq_lens,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
    )
