"""A KV connector: blocks of prompts in the host's memory, where they outlive the engine's own cache.

The halves may live in two processes, so they share nothing but messages: the scheduler side says what to load and
keep, the worker side reports what it has. To stay short it keeps what a request computes in its first step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from frame.interfaces import (
    CacheView,
    ConnectorScheduler,
    ConnectorSetup,
    ConnectorWorker,
    ConnectorWorkerSetup,
    RequestView,
    StepPlan,
    TransferReport,
    decode,
    encode,
)

#: (key, block ids in each KV group); 0 where a group needs none
Move = tuple[bytes, list[list[int]]]
#: Steps after a broken one that may have been planned before the scheduler heard of it.
WARY_STEPS = 16


# --8<-- [start:options]
class MemoryOptions(BaseModel):
    """Filled from `--plugin.example-memory.max_blocks`, or the same in YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_blocks: int = Field(1000, ge=1, description="Blocks that are kept; those unused for longest go first.")


# --8<-- [end:options]
# --8<-- [start:scheduler]
class MemoryScheduler(ConnectorScheduler):
    """Runs beside the scheduler: knows which blocks there are, never what is in them."""

    def __init__(self, setup: ConnectorSetup, options: MemoryOptions) -> None:
        super().__init__(setup, options)
        self._kept: set[bytes] = set()
        self._hashes: dict[str, Sequence[bytes]] = {}
        self._loads: list[Move] = []
        self._drop = False

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        size = self.layout.grain
        hashes = self._hashes[request.request_id] = request.block_hashes
        last = min(len(hashes), (len(request.token_ids) - 1) // size)
        first = index = num_computed // size
        while index < last and hashes[index] in self._kept:
            index += 1
        return max(0, index - first) * size, False

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        size, group = self.layout.grain, self.layout.groups[0]
        last = len(block_ids[0]) * group.block_size // size
        for index in range(last - num_external // size, last):
            self._loads.append((request.block_hashes[index], self.layout.grain_blocks(block_ids, index)))

    def build_message(self, plan: StepPlan) -> bytes:
        size, saves = self.layout.grain, []
        scheduled = dict(zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True))
        for new in plan.added:
            hashes = self._hashes.get(new.request_id, ())
            end = (new.num_computed + scheduled.get(new.slot, 0)) // size
            for index in range(new.num_computed // size, min(end, len(hashes))):
                blocks = self.layout.grain_blocks(new.block_ids, index)
                if all(map(all, blocks)):
                    saves.append((hashes[index], blocks))
        message = (self._loads, saves, self._drop) if self._loads or saves or self._drop else None
        self._loads, self._drop = [], False
        return b"" if message is None else encode(message)

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self._hashes.pop(request.request_id, None)
        return False, None

    def update(self, report: TransferReport) -> None:
        self._kept.update(report.events)
        self._kept.difference_update(key for _, key in report.notes)

    def reset(self) -> bool:
        self._kept.clear()
        self._drop = True
        return True


# --8<-- [end:scheduler]
# --8<-- [start:worker]
class MemoryWorker(ConnectorWorker):
    """Runs beside the KV memory: copies blocks as raw bytes, never knowing what a layer puts in them."""

    def __init__(self, setup: ConnectorWorkerSetup, options: MemoryOptions) -> None:
        super().__init__(setup, options)
        self._store: OrderedDict[bytes, list[Tensor]] = OrderedDict()
        self._caches: list[tuple[int, Tensor]] = []
        self._saves: list[Move] = []
        self._failed: list[tuple[int, int]] = []
        self._in_step = False
        self._wary = 0

    def register(self, caches: Mapping[str, CacheView]) -> None:
        self._caches = [(view.group, view.bytes) for view in caches.values()]

    def begin_step(self, message: bytes) -> None:
        # the step before raised: what was planned on top of it holds blocks that were never filled
        self._wary = WARY_STEPS if self._in_step else max(0, self._wary - 1)
        self._in_step = True
        self._saves, self._failed = [], []
        if message:
            loads, self._saves, drop = decode(message, tuple[list[Move], list[Move], bool])
            if drop:
                self._store.clear()
            for key, blocks in loads:
                self._load(key, blocks)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self._in_step = False
        stored, dropped = [], []
        # a failed load spoils what its request computed from it; which request that was does not matter here
        for key, blocks in [] if self._wary or self._failed else self._saves:
            self._store[key] = [cache[blocks[group]].cpu() for group, cache in self._caches]
            stored.append(key)
        while len(self._store) > self.options.max_blocks:
            dropped.append((self.rank, self._store.popitem(last=False)[0]))
        gauges = {"kept_blocks": float(len(self._store))}
        return TransferReport(failed_blocks=self._failed, events=stored, notes=dropped, gauges=gauges)

    def _load(self, key: bytes, blocks: list[list[int]]) -> None:
        content = self._store.get(key)
        if content is None:
            self._failed += [(group, block) for group, some in enumerate(blocks) for block in some if block]
            return
        self._store.move_to_end(key)
        for (group, cache), data in zip(self._caches, content, strict=True):
            for block, row in zip(blocks[group], data, strict=True):
                if block:
                    cache[block].copy_(row)


# --8<-- [end:worker]
