"""A connector that keeps blocks in this process, by folder: right, and wrong in several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel
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

Store = dict[bytes, dict[str, Tensor]]

#: (folder, which blocks, rank) → block hash → bytes of the block in each layer
STORES: dict[tuple[str, bytes, int], Store] = {}
#: Steps after a broken one that may have been planned before the scheduler heard of it.
WARY = 4


class Options(BaseModel):
    folder: Path


def store_of(setup: ConnectorSetup, options: Options, rank: int) -> Store:
    """What engines of equal weights, layout and number of ranks keep of one rank."""
    kind = encode([setup.layout.model, setup.layout.groups, setup.mesh.engine_size])
    return STORES.setdefault((str(options.folder), kind, rank), {})


class Message(msgspec.Struct):
    """Moves are (hash, blocks in each group)."""

    loads: list[tuple[str, list[tuple[bytes, list[list[int]]]]]] = []
    saves: list[tuple[bytes, list[list[int]]]] = []


class Keeping(ConnectorScheduler):
    """Keeps what a request computes in its first step. Loads at once."""

    later: ClassVar[bool] = False
    holds: ClassVar[bool] = False
    refuses: ClassVar[bool] = True
    store_of = staticmethod(store_of)

    def __init__(self, setup: ConnectorSetup, options: Options) -> None:
        super().__init__(setup, options)
        if self.refuses and any(group.keeps_states for group in setup.layout.groups):
            raise ValueError("states are not kept")
        self.stores = [self.store_of(setup, options, rank) for rank in range(setup.mesh.engine_size)]
        self.hashes: dict[str, Sequence[bytes]] = {}
        self.loads: list[tuple[str, list[tuple[bytes, list[list[int]]]]]] = []

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        self.hashes[request.request_id] = request.block_hashes
        size = self.layout.grain
        index = num_computed // size
        while index < len(request.block_hashes) and all(request.block_hashes[index] in kept for kept in self.stores):
            index += 1
        count = max(0, min(index, (len(request.token_ids) - 1) // size) * size - num_computed)
        return count, self.later and count > 0

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        if not num_external:
            return
        layout = self.layout
        last = len(block_ids[0]) * layout.groups[0].block_size // layout.grain
        first = last - num_external // layout.grain
        moves = [(request.block_hashes[i], layout.grain_blocks(block_ids, i)) for i in range(first, last)]
        self.loads.append((request.request_id, moves))

    def build_message(self, plan: StepPlan) -> bytes:
        message, self.loads = Message(loads=self.loads), []
        size = self.layout.grain
        scheduled = dict(zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True))
        for new in plan.added:
            hashes = self.hashes.get(new.request_id, ())
            full = min((new.num_computed + scheduled.get(new.slot, 0)) // size, len(hashes))
            for index in range(new.num_computed // size, full):
                blocks = self.layout.grain_blocks(new.block_ids, index)
                if all(map(all, blocks)):
                    message.saves.append((hashes[index], blocks))
        return encode(message)

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self.hashes.pop(request.request_id, None)
        return self.holds, None

    def reset(self) -> bool:
        for kept in self.stores:
            kept.clear()
        return True


class Late(Keeping):
    later = True


class KeepingSender(Keeping):
    holds = True


class LateSender(Late):
    holds = True


class Keeper(ConnectorWorker):
    """Copies at the borders of a step; a load that may be late is, by two steps, and so is what is sent."""

    store_of = staticmethod(store_of)

    def __init__(self, setup: ConnectorWorkerSetup, options: Options) -> None:
        super().__init__(setup, options)
        self.store = self.store_of(setup, options, self.rank)
        self.message = Message()
        self.step = self.wary = 0
        self.open = False
        self.waiting: list[tuple[int, str]] = []
        self.sending: list[tuple[int, str]] = []

    def register(self, caches: Mapping[str, CacheView]) -> None:
        self.caches = {layer: view.bytes for layer, view in caches.items()}

    def begin_step(self, message: bytes) -> None:
        self.step += 1
        if self.open:
            self.wary = self.step + WARY
        self.open = True
        self.message = decode(message, Message) if message else Message()
        for request_id, moves in self.message.loads:
            for key, blocks in moves:
                self.load(key, blocks)
            self.waiting.append((self.step + 2, request_id))

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self.open = False
        if self.step >= self.wary:
            for key, blocks in self.message.saves:
                self.save(key, blocks)
        self.sending += [(self.step + 2, name) for name in finished]
        received = [name for due, name in self.waiting if due <= self.step]
        sent = [name for due, name in self.sending if due <= self.step]
        self.waiting = [pair for pair in self.waiting if pair[0] > self.step]
        self.sending = [pair for pair in self.sending if pair[0] > self.step]
        return TransferReport(received=received, sent=sent)

    def load(self, key: bytes, blocks: list[list[int]]) -> None:
        for group, some in zip(self.layout.groups, blocks, strict=True):
            for layer in group.layers:
                for block, row in zip(some, self.store[key][layer], strict=True):
                    if block:
                        self.caches[layer][block] = row

    def save(self, key: bytes, blocks: list[list[int]]) -> None:
        self.store[key] = {
            layer: self.caches[layer][some]
            for group, some in zip(self.layout.groups, blocks, strict=True)
            for layer in group.layers
        }


class EarlyKeeper(Keeper):
    """Wrong: publishes also what a broken step should have saved."""

    def begin_step(self, message: bytes) -> None:
        if self.open:
            for key, blocks in self.message.saves:
                self.save(key, blocks)
        super().begin_step(message)


class Mixing(Keeper):
    """Wrong: fills every block with the one that was saved first."""

    def load(self, key: bytes, blocks: list[list[int]]) -> None:
        super().load(next(iter(self.store)), blocks)


class Unaligned(Keeping):
    """Wrong: counts tokens, not blocks."""

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        count, later = super().matched_tokens(request, num_computed)
        return (count - 1 if count else 0), later


class Holding(Keeping):
    """Wrong: holds blocks, under another name than the worker side knows."""

    holds = True

    def build_message(self, plan: StepPlan) -> bytes:
        plan.finished_ids = []
        return super().build_message(plan)
