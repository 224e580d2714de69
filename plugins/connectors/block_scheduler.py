"""The scheduler side of connectors that store prompt blocks: which blocks each step saves and loads.

A block is saved in the step that fills it, because every KV group still holds it then, also groups that keep only a
window. Only blocks of prompts are saved. Loaded are consecutive blocks that follow the prefix which the engine has
itself. Does not know where blocks are stored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frame.interfaces import (
    ConnectorScheduler,
    ConnectorSetup,
    RequestView,
    StepPlan,
    TransferReport,
    decode,
    encode,
)

from .block_messages import BlockStep, Move, blocks_name


@dataclass
class Prompt:
    """A running request whose prompt has blocks left to save; `tables[g]` are its block ids, as the worker has them."""

    request_id: str
    hashes: Sequence[bytes]
    tables: list[list[int]]


class BlockScheduler(ConnectorScheduler):
    """See the module. `title` is the connector's name. Raises `ValueError` for layers that keep a running state."""

    title: str

    def __init__(self, setup: ConnectorSetup, options: Any) -> None:
        super().__init__(setup, options)
        for group in self.layout.groups:
            if group.keeps_states:
                raise ValueError(f"the {self.title} connector cannot keep the running state of layer {group.layers[0]}")
        self.blocks_name = blocks_name(self.layout, setup.mesh)
        self.spaces: list[str] = []  # where the worker of each rank keeps its blocks
        self.loads_any = setup.role != "producer"
        self._saves_any = setup.role != "consumer"
        self._hashes: dict[str, Sequence[bytes]] = {}  # by request id
        self._prompts: dict[int, Prompt] = {}  # by slot
        self._loads: list[Move] = []
        self._breaks: dict[int, int] = {}  # by rank
        self._num_messages = 0
        self._asked_tokens = self._found_tokens = 0  # since the last report

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        self.spaces = [f"{self.blocks_name}/{rank}-{formats.decode()}" for rank, formats in sorted(handshakes.items())]

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        self._hashes[request.request_id] = request.block_hashes
        if not self.loads_any:
            return 0, False
        size = self.layout.grain
        # one token is always computed: its logits are needed
        last = min(len(request.block_hashes), (len(request.token_ids) - 1) // size)
        return self.match(request, num_computed // size, last)

    @abstractmethod
    def match(self, request: RequestView, first: int, last: int) -> tuple[int | None, bool]:
        """As `matched_tokens`, for the grains [first, last) of the prompt."""

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        self._tally(request, block_ids, num_external)
        layout = self.layout
        last = len(block_ids[0]) * layout.groups[0].block_size // layout.grain
        for index in range(last - num_external // layout.grain, last):
            blocks = layout.grain_blocks(block_ids, index)
            self._loads.append(Move(request.request_id, request.block_hashes[index], blocks, index))

    def build_message(self, plan: StepPlan) -> bytes:
        loads, self._loads = self._loads, []
        entered = self._follow(plan) if self._saves_any else []
        followed = bool(self._prompts)
        saves = self._completed(plan) if followed else []
        # a prompt that is not saved to its end has a message in each step: without it, the worker would not know of a
        # step that failed before it heard of it
        if not (loads or saves or entered or followed or self.waits):
            return b""
        self._num_messages += 1
        return encode(
            self.message(
                BlockStep(
                    blocks_name=self.blocks_name,
                    number=self._num_messages - 1,
                    loads=loads,
                    saves=saves,
                    entered=entered,
                    known_breaks=dict(self._breaks),
                )
            )
        )

    @property
    def waits(self) -> bool:
        """Whether the worker side is to get a message although there is nothing new."""
        return False

    def message(self, step: BlockStep) -> BlockStep:
        """The message for the worker side; a subclass may return one with more fields."""
        return step

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        self._hashes.pop(request.request_id, None)
        return False, None

    def update(self, report: TransferReport) -> Iterable[str] | None:
        for rank, note in report.notes:
            self._breaks[rank] = decode(note, int)
        tokens = {"lookup_tokens": self._asked_tokens, "hit_tokens": self._found_tokens}
        report.counters.update({f"{self.title}_{name}": float(count) for name, count in tokens.items() if count})
        self._asked_tokens = self._found_tokens = 0
        return None

    def _tally(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """Counts the tokens of whole grains that the device lacked, and those of them that are loaded."""
        if self.loads_any:
            grain = self.layout.grain
            here = len(block_ids[0]) * self.layout.groups[0].block_size // grain * grain - num_external
            self._asked_tokens += max(0, len(request.block_hashes) * grain - here)
            self._found_tokens += num_external

    def _follow(self, plan: StepPlan) -> list[str]:
        """Updates which request has which slot and blocks; returns the ids of requests that begin in this step."""
        for slot in plan.removed_slots.tolist():
            self._prompts.pop(slot, None)
        entered = []
        for new in plan.added:
            hashes = self._hashes.get(new.request_id, ())
            if new.num_computed // self.layout.grain < len(hashes):
                tables = [blocks.tolist() for blocks in new.block_ids]
                self._prompts[new.slot] = Prompt(new.request_id, hashes, tables)
                entered.append(new.request_id)
        for append in plan.appends if self._prompts else ():
            rows = zip(append.slots.tolist(), append.offsets.tolist(), append.block_ids.tolist(), strict=True)
            for slot, offset, block in rows:
                prompt = self._prompts.get(slot)
                if prompt is not None:
                    table = prompt.tables[append.group]
                    table.extend([0] * (offset + 1 - len(table)))
                    table[offset] = block
        return entered

    def _completed(self, plan: StepPlan) -> list[Move]:
        """The prompt blocks that this step fills."""
        size, moves = self.layout.grain, []
        rows = zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True)
        for slot, num_computed, count in rows:
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            last = min((num_computed + count) // size, len(prompt.hashes))
            for index in range(num_computed // size, last):
                blocks = self.layout.grain_blocks(prompt.tables, index)
                if all(map(all, blocks)):
                    moves.append(Move(prompt.request_id, prompt.hashes[index], blocks, index))
            if last == len(prompt.hashes):
                del self._prompts[slot]
        return moves
