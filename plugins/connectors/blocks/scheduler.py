"""The scheduler side of connectors that store prompt blocks: which blocks each step saves and loads.

A block is saved in the step that fills it, because every KV group still holds it then, also groups that keep only a
window; a running state in the step behind that, which copies it for the prefix cache. Only blocks of prompts are saved.
Loaded are consecutive blocks that follow the prefix which the engine has itself, and the state behind the last of them.
Does not know where blocks are stored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from .messages import BlockStep, Move, blocks_name, state_key


@dataclass
class Prompt:
    """A running request whose prompt has blocks left to save; `tables[g]` are its block ids, as the worker has them.

    `num_computed` are its tokens behind the steps that were planned.
    """

    request_id: str
    hashes: Sequence[bytes]
    tables: list[list[int]]
    num_computed: int


class BlockScheduler(ConnectorScheduler):
    """See the module. `title` is the connector's name. Raises `ValueError` for layers that keep an encoder's tokens."""

    title: str

    def __init__(self, setup: ConnectorSetup, options: Any) -> None:
        super().__init__(setup, options)
        groups = self.layout.groups
        for group in groups:
            if group.keeps_encoded:
                raise ValueError(
                    f"the {self.title} connector cannot keep an encoder's tokens of layer {group.layers[0]}"
                )
        self._states = [index for index, group in enumerate(groups) if group.keeps_states]
        self._keeps_tokens = len(self._states) < len(groups)
        grain = self.layout.grain
        self._counts = [0 if group.keeps_states else grain // group.block_size for group in groups]
        self.blocks_name = blocks_name(self.layout, setup.mesh)
        self.spaces: list[str] = []  # where the worker of each rank keeps its blocks
        self.loads_any = setup.role != "producer"
        self._saves_any = setup.role != "consumer"
        self._hashes: dict[str, Sequence[bytes]] = {}  # by request id
        self._firsts: dict[str, int] = {}  # by request id: the grain from which on blocks were looked for last
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
        self._firsts[request.request_id] = num_computed // size
        return self.match(request, num_computed // size, last)

    @abstractmethod
    def match(self, request: RequestView, first: int, last: int) -> tuple[int | None, bool]:
        """As `matched_tokens`, for the grains [first, last) of the prompt."""

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        self._tally(request, num_external)
        count, owner, hashes = num_external // self.layout.grain, request.request_id, request.block_hashes
        first = self.found_from(request)
        if self._keeps_tokens:
            found = enumerate(self._grains(block_ids, first, first + count), first)
            self._loads += [Move(owner, hashes[index], blocks, index) for index, blocks in found]
        if count and self._states:
            states = {group: int(block_ids[group][0]) for group in self._states}
            self._loads.append(self._state(owner, hashes, states, first + count - 1))

    def longest(self, request: RequestView, first: int, last: int, has: Callable[[bytes], bool]) -> int:
        """How many tokens, whole grains from number `first` on, can be loaded if `has` says which keys are stored."""
        hashes = request.block_hashes
        return self.run(first, last, lambda place: has(hashes[place]), lambda place: has(state_key(hashes[place])))

    def run(self, first: int, last: int, has: Callable[[int], bool], has_state: Callable[[int], bool]) -> int:
        """As `longest`, by the numbers of grains: whose tokens are stored, and behind which the state is."""
        index = first
        while index < last and (not self._keeps_tokens or has(index)):
            index += 1
        while index > first and self._states and not has_state(index - 1):
            index -= 1
        return max(0, index - first) * self.layout.grain

    def found_from(self, request: RequestView) -> int:
        """The grain of the request's prompt from which on blocks were looked for last."""
        return self._firsts.get(request.request_id, 0)

    def keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        """All keys under which something of these grains may be stored."""
        found = list(hashes) if self._keeps_tokens else []
        return found + [state_key(one) for one in hashes] if self._states else found

    def build_message(self, plan: StepPlan) -> bytes:
        loads, self._loads = self._loads, []
        states = self._copied(plan) if self._prompts else []
        entered = self._follow(plan) if self._saves_any else []
        followed = bool(self._prompts)
        saves = self._completed(plan) if followed else []
        # a prompt that is not saved to its end has a message in each step: without it, the worker would not know of a
        # step that failed before it heard of it
        if not (loads or saves or states or entered or followed or self.waits):
            return b""
        self._num_messages += 1
        return encode(
            self.message(
                BlockStep(
                    blocks_name=self.blocks_name,
                    number=self._num_messages - 1,
                    loads=loads,
                    saves=saves,
                    states=states,
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
        self._firsts.pop(request.request_id, None)
        return False, None

    def update(self, report: TransferReport) -> Iterable[str] | None:
        for rank, note in report.notes:
            self._breaks[rank] = decode(note, int)
        tokens = {"lookup_tokens": self._asked_tokens, "hit_tokens": self._found_tokens}
        report.counters.update({f"{self.title}_{name}": float(count) for name, count in tokens.items() if count})
        self._asked_tokens = self._found_tokens = 0
        return None

    def _tally(self, request: RequestView, num_external: int) -> None:
        """Counts the tokens of whole grains that the device lacked, and those of them that are loaded."""
        if self.loads_any:
            lacked = len(request.block_hashes) - self.found_from(request)
            self._asked_tokens += max(0, lacked) * self.layout.grain
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
                self._prompts[new.slot] = Prompt(new.request_id, hashes, tables, new.num_computed)
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
            prompt.num_computed = num_computed + count
            last = min((num_computed + count) // size, len(prompt.hashes))
            first = num_computed // size
            found = self._grains(prompt.tables, first, last) if self._keeps_tokens else []
            moves += [
                Move(prompt.request_id, prompt.hashes[index], blocks, index)
                for index, blocks in enumerate(found, first)
                if all(map(all, blocks))
            ]
            # the state that it leaves is copied by a later step
            if last == len(prompt.hashes) and not (self._states and num_computed // size < last):
                del self._prompts[slot]
        return moves

    def _grains(self, tables: Sequence[Sequence[int]], first: int, last: int) -> list[list[list[int]]]:
        """As `KVLayout.grain_blocks` of the grains [first, last)."""
        groups = []
        for table, count in zip(tables, self._counts, strict=True):
            blocks = [int(block) for block in table[first * count : last * count]]
            groups.append([blocks[place * count : (place + 1) * count] for place in range(last - first)])
        return [list(blocks) for blocks in zip(*groups, strict=True)]

    def _copied(self, plan: StepPlan) -> list[Move]:
        """The states of prompts that this step copies first, and whose copies it does not overwrite by another.

        Copies read what the steps before left, so a block that is copied is still that of its owner, even where the
        owner leaves in this plan: its next owner computes in this step at the earliest and is copied by a later one.
        """
        size, owners, found = self.layout.grain, dict[tuple[int, int], int](), dict[int, dict[int, int]]()
        for slot, prompt in self._prompts.items() if plan.copies else ():
            if prompt.num_computed % size == 0 and 0 < prompt.num_computed <= len(prompt.hashes) * size:
                owners.update({(group, prompt.tables[group][0]): slot for group in self._states})
        pairs = [
            (copy.group, source, target)
            for copy in plan.copies
            for source, target in zip(copy.sources.tolist(), copy.targets.tolist(), strict=True)
        ]
        final = {(group, target): place for place, (group, _, target) in enumerate(pairs)}
        for place, (group, source, target) in enumerate(pairs):
            owner = owners.get((group, source))
            if owner is not None and final[group, target] == place:
                found.setdefault(owner, {})[group] = target
        return [
            self._state(prompt.request_id, prompt.hashes, copies, prompt.num_computed // size - 1)
            for slot, copies in found.items()
            if len(copies) == len(self._states) and (prompt := self._prompts[slot])
        ]

    def _state(self, owner: str, hashes: Sequence[bytes], blocks: Mapping[int, int], index: int) -> Move:
        """The state behind a grain, in `blocks` by group."""
        tables = [[blocks[group]] if group in blocks else [] for group in range(len(self.layout.groups))]
        return Move(owner, state_key(hashes[index]), tables, index, state=True)
