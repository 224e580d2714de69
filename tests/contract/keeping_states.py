"""A connector that keeps states beside blocks in this process: right, and wrong in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec import field

from frame.interfaces import ConnectorSetup, ConnectorWorkerSetup, RequestView, StepPlan, TransferReport, decode, encode
from frame.plugins.connectors.blocks.messages import Move
from frame.plugins.connectors.disk.worker import DiskWorker
from tests.contract.keeping import Keeper, Keeping, Message, Options


class StateMessage(Message):
    """`states` are (hash, block) of copies that the step makes; `state_loads` (hash, block of a request)."""

    states: list[tuple[bytes, int]] = field(default_factory=list)
    state_loads: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass
class Running:
    """A request in a slot: its state's block, and the tokens that it stands for behind the steps planned."""

    hashes: Sequence[bytes]
    block: int
    num_computed: int


def of_state(key: bytes) -> bytes:
    return key + b" state"


class KeepingStates(Keeping):
    """Right. There is one group of states; what is loaded is there two steps later."""

    later = True
    refuses: ClassVar[bool] = False
    copied = "targets"

    def __init__(self, setup: ConnectorSetup, options: Options) -> None:
        super().__init__(setup, options)
        self.group = next(index for index, group in enumerate(self.layout.groups) if group.keeps_states)
        self.running: dict[int, Running] = {}
        self.firsts: dict[str, int] = {}
        self.state_loads: list[tuple[bytes, int]] = []

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        count, _ = super().matched_tokens(request, num_computed)
        size = self.layout.grain
        first = self.firsts[request.request_id] = num_computed // size
        if count is None:
            return None, False
        grains = self.whole(request.block_hashes, first, first + count // size)
        return grains * size, grains > 0

    def whole(self, hashes: Sequence[bytes], first: int, last: int) -> int:
        """How many grains up to the last one behind which a state is kept."""
        while last > first and not all(of_state(hashes[last - 1]) in kept for kept in self.stores):
            last -= 1
        return last - first

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        if num_external and all(group.keeps_states for group in self.layout.groups):
            self.loads.append((request.request_id, []))
        else:
            super().allocated(request, block_ids, num_external)
        if num_external:
            place = self.firsts[request.request_id] + num_external // self.layout.grain - 1
            self.state_loads.append((of_state(request.block_hashes[place]), int(block_ids[self.group][0])))

    def build_message(self, plan: StepPlan) -> bytes:
        states = self.states_of(plan)
        for slot in plan.removed_slots.tolist():
            self.running.pop(slot, None)
        for new in plan.added:
            hashes = self.hashes.get(new.request_id, ())
            self.running[new.slot] = Running(hashes, int(new.block_ids[self.group][0]), new.num_computed)
        for slot, count in zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True):
            self.running[slot].num_computed += count
        made = decode(super().build_message(plan), Message)
        loads, self.state_loads = self.state_loads, []
        return encode(StateMessage(loads=made.loads, saves=made.saves, states=states, state_loads=loads))

    def states_of(self, plan: StepPlan) -> list[tuple[bytes, int]]:
        """What the step's copies hold, but for those that a later copy overwrites."""
        size, found = self.layout.grain, dict[int, bytes | None]()
        owners = {one.block: one for one in self.running.values()}
        for copy in plan.copies:
            targets = getattr(copy, self.copied).tolist()
            for source, target in zip(copy.sources.tolist(), targets, strict=True):
                place, rest = divmod(owners[source].num_computed, size) if source in owners else (0, 1)
                known = not rest and 0 < place <= len(owners[source].hashes)
                found[target] = of_state(owners[source].hashes[place - 1]) if known else None
        return [(key, block) for block, key in found.items() if key is not None]


class StateKeeper(Keeper):
    """Right: reads copies before the step goes on."""

    moves_states = True
    tardy = False

    def __init__(self, setup: ConnectorWorkerSetup, options: Options) -> None:
        super().__init__(setup, options)
        self.states: list[tuple[bytes, int]] = []

    def begin_step(self, message: bytes) -> None:
        told = decode(message, StateMessage) if message else StateMessage()
        sound = not self.open and self.step + 1 >= self.wary
        self.states = told.states if sound else []
        if not self.tardy:
            self.save_states()
        super().begin_step(message)
        for key, block in told.state_loads:
            for layer, rows in self.store[key].items():
                self.caches[layer][block] = rows

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self.save_states()
        return super().end_step(finished)

    def save_states(self) -> None:
        layers = [layer for group in self.layout.groups if group.keeps_states for layer in group.layers]
        for key, block in self.states:
            self.store[key] = {layer: self.caches[layer][block].clone() for layer in layers}
        self.states = []


class KeepingLive(KeepingStates):
    """Wrong: reads states themselves, not their copies."""

    copied = "sources"


class TardyKeeper(StateKeeper):
    """Wrong: reads at the end of the step."""

    tardy = True


class Stateless(KeepingStates):
    """Wrong: goes as far as blocks of tokens are there."""

    def whole(self, hashes: Sequence[bytes], first: int, last: int) -> int:
        return last - first

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        Keeping.allocated(self, request, block_ids, num_external)


class Older(Stateless):
    """Wrong: takes the state of a shorter prefix where that of the whole one is not there."""

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        super().allocated(request, block_ids, num_external)
        last = self.firsts[request.request_id] + num_external // self.layout.grain
        kept = [of_state(key) for key in request.block_hashes[:last] if of_state(key) in self.stores[0]]
        if num_external and kept:
            self.state_loads.append((kept[-1], int(block_ids[self.group][0])))


class BelievingDisk(DiskWorker):
    """Wrong: takes a state that is damaged for loaded."""

    def fail(self, moves: Sequence[Move]) -> None:
        super().fail([move for move in moves if not move.state])
