"""A worker without a model. Its cache says which prefix each entry is of, so a wrong or late block changes tokens.

For tests of schedulers, executors, connectors and policies; knows no device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.attention import GroupBatch
from frame.core.interfaces.connector import ConnectorWorker, NullConnectorWorker
from frame.core.interfaces.executor import Progress, WorkerDescription, WorkerFacts, WorkerReady
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.kv_layout import pool_bytes
from frame.core.interfaces.step import LogprobRows, StepPlan, StepResult
from frame.core.worker.step.runner import CONNECTOR, NO_HOOKS
from frame.transfers.untold import UntoldReports

from .fake_cache import (
    BAD,
    WRONG_TOKEN,
    Resident,
    extend_prefix,
    make_layout,
    next_token,
)
from .fake_memory import FakeMemory
from .setups import make_setup


class BrokenStepError(RuntimeError):
    """Raised by a step that a test wants to fail."""


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

    Steps numbered in `broken_steps` raise in the middle of the forward pass and leave wrong entries. `calls` records
    every call by name; `dead` makes `check` raise, `start_error` makes `load` raise. While `strict`, a plan that no
    sound scheduler makes is an `AssertionError`: a slot that is taken or still named by one of the `unanswered` steps,
    a count or block that cannot be, an entry of another prefix; broken steps are followed by such plans. Drawn tokens
    are below `vocab`. With `most_drafts` up to so many drafts are proposed for each row, and `luck` says how many there
    are and which hold.
    """

    layout: KVLayout = field(default_factory=make_layout)
    connector: Callable[[KVLayout], ConnectorWorker] | None = None
    broken_steps: Collection[int] = ()
    rank: int = 0
    dead: bool = False
    start_error: str | None = None
    calls: list[str] = field(default_factory=list)
    strict: bool = False
    vocab: int = WRONG_TOKEN
    most_drafts: int = 0
    luck: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.slots: dict[int, Resident] = {}
        self.unanswered: list[StepPlan] = []
        self.untold = UntoldReports()
        self.closed = False
        self.transfer: ConnectorWorker = NullConnectorWorker(make_setup("connector", part="worker", layout=self.layout))
        self._executed: StepResult | None = None

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
        self.memory = FakeMemory(layout, self.rank)
        if self.connector is not None:
            self.transfer = self.connector(layout)
            kept = [group.layers[0] for group in layout.groups if group.keeps_states]
            if kept and not self.transfer.moves_states:
                raise ValueError(f"the KV connector cannot move what {kept[0]!r} keeps")
        self.transfer.register(self.memory.views)
        return WorkerReady(handshake=self.transfer.handshake())

    def execute(self, plan: StepPlan) -> None:
        """Applies the plan; as on a device, a step that breaks leaves its state changes in place."""
        for _ in self.layers(plan):
            pass

    def layers(self, plan: StepPlan) -> Iterator[None]:
        """As `execute`, layer by layer: the ranks of a model exchange behind each what they computed."""
        self.calls.append("execute")
        self._executed = None
        self._change_state(plan)
        self.unanswered.append(plan)
        for copy in plan.copies:
            self.memory.copy(copy)
        self.untold.begin(plan)
        self.transfer.begin_step(plan.extras.get(CONNECTOR, b""))
        rows = [self.slots[slot] for slot in plan.slots.tolist()]
        starts = [self._begin(plan, row, resident) for row, resident in enumerate(rows)]
        yield from self._forward(plan, rows, starts)
        result = self._draw_rows(plan, rows, starts)
        if plan.step in self.broken_steps:
            raise BrokenStepError(f"step {plan.step} was told to break")
        report = self.transfer.end_step(plan.finished_ids)
        result.transfer = self.untold.told(plan, report, self.transfer)
        self._executed = result

    def sample(self, masks: bytes = b"") -> FakeHandle:
        """The step executed last; masks are ignored."""
        del masks
        self.calls.append("sample")
        executed, self._executed = self._executed, None
        if executed is None:
            raise RuntimeError("there is no executed step to sample")
        return FakeHandle(executed)

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Answers what an engine calls for sleep, `describe`, `echo`, and `synchronize`, where a dead worker raises.

        Raises `ValueError` for anything else.
        """
        self.calls.append(f"call {method}")
        if method == "describe":
            return {"platform": "fake", "attention": ["fake"], "dtype": "float32", "stages": [], "rank": self.rank}
        if method == "echo":
            return arguments
        if method == "synchronize":
            return self.check()
        if method == "end_transfers":
            return self.transfer.end_access()
        if method == "renew_cache":
            return self._renew()
        if method == "sleep":
            return self._sleep()
        if method == "wake_up":
            if "kv_cache" in (arguments or {}).get("tags", ()) and self.memory.lost:
                self.memory = FakeMemory(self.layout, self.rank)
                self.transfer.register(self.memory.views)
            return None
        known = "describe, echo, end_transfers, renew_cache, sleep, synchronize, wake_up"
        raise ValueError(f"no worker method {method!r}; there are: {known}")

    def _sleep(self) -> None:
        try:
            self.transfer.register({})
        except BaseException:
            self.transfer.register(self.memory.views)
            raise
        self.memory.lose()

    def _renew(self) -> bool:
        try:
            self.transfer.register({})
        except Exception:
            return False
        finally:
            self.transfer.register(self.memory.views)
        return True

    def check(self) -> None:
        """Raises when a test declared the worker dead."""
        if self.dead:
            raise RuntimeError(f"worker {self.rank} is dead")

    def fileno(self) -> int:
        """There is nothing to wait for."""
        raise NotImplementedError("a fake worker has no descriptor")

    def silent_seconds(self) -> float:
        """It always runs."""
        return 0.0

    def progress(self) -> Progress:
        """It counts nothing."""
        return Progress(0, 0, 0)

    def begin_close(self, *, kills: bool = False) -> None:
        """There is no process to end."""

    def close(self) -> None:
        """Closes the connector, once."""
        self.calls.append("close")
        if not self.closed:
            self.transfer.close()
        self.closed = True

    def answered(self, plan: StepPlan) -> None:
        """The engine has the answer of a step: its slots may be given away."""
        self.unanswered.remove(plan)

    def put(self, group: int, block: int, position: int, prefix: int) -> None:
        """Stores, in all layers of a group, that the token at `position`, in that block, stands for a prefix."""
        one, offset = range(position, position + 1), self._offset(group, position)
        for number in range(len(self.layout.groups[group].layers)):
            places = np.array([block]), np.array([offset])
            self.memory.store(group, number, places, self.memory.wanted(group, number, one, [prefix]))

    def prefix_at(self, group: int, block: int, position: int) -> int:
        """The prefix that the token at `position`, in that block, stands for, as the group's first layer has it."""
        offset = self._offset(group, position)
        return int(self.memory.found(group, 0, np.array([block]), np.array([offset]))[0, 2])

    def _offset(self, group: int, position: int) -> int:
        of = self.layout.groups[group]
        return 0 if of.keeps_states else position % of.block_size

    def _expect(self, holds: bool, what: str) -> None:
        if self.strict and not holds:
            raise AssertionError(what)

    def _change_state(self, plan: StepPlan) -> None:
        for slot in plan.removed_slots.tolist():
            self._expect(slot in self.slots, f"slot {slot} is removed and empty")
            self.slots.pop(slot, None)
        for new in plan.added:
            named = [earlier.step for earlier in self.unanswered if new.slot in earlier.slots]
            self._expect(new.slot not in self.slots, f"slot {new.slot} is taken")
            self._expect(not named, f"slot {new.slot} is still named by steps {named}")
            self._expect(new.num_computed < len(new.token_ids), f"{new.request_id} has nothing to compute")
            self._expect(new.slot in plan.slots, f"{new.request_id} is added without a token")
            self.slots[new.slot] = Resident.of(new)
        for append in plan.appends:
            columns = (append.slots, append.offsets, append.block_ids)
            for slot, offset, block in zip(*(column.tolist() for column in columns), strict=True):
                table = self.slots[slot].tables[append.group]
                self._expect(offset == len(table), f"slot {slot} has {len(table)} blocks and gets number {offset}")
                table.extend([0] * (offset + 1 - len(table)))
                table[offset] = block

    def _begin(self, plan: StepPlan, row: int, resident: Resident) -> tuple[int, int]:
        """(the first token that a row computes, the number of known tokens); drafts follow them."""
        computed, planned = int(plan.num_computed[row]), int(plan.num_drafts[row])
        count = int(plan.num_scheduled[row]) - planned
        start = resident.num_computed if self.most_drafts else computed
        name = resident.request_id
        self._expect(computed >= start, f"{name}: {computed} tokens are taken as computed, but {start} are")
        self._expect(
            start == resident.num_computed, f"{name}: {resident.num_computed} tokens are computed, not {start}"
        )
        self._expect(not planned or (count == 1 and planned <= self.most_drafts), f"{name}: {planned} drafts")
        self._expect(start + count <= len(resident.tokens), f"{name}: a token that does not exist is computed")
        self._expect(computed + count + planned < resident.max_len, f"{name}: a token past the last is planned")
        resident.spoiled |= plan.step in self.broken_steps
        while len(resident.tokens) < start + count:
            resident.append(WRONG_TOKEN)  # its token was lost with a broken step
        return start, count

    def _forward(self, plan: StepPlan, rows: Sequence[Resident], starts: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Writes and reads every layer, hooks around it; who reads a wrong entry is spoiled."""
        if not rows:
            return
        batch = _batch_of(plan)
        several = batch.max_query_len > 1 or self.transfer.hooks.decode_steps
        hooks = self.transfer.hooks if several else NO_HOOKS
        for index, group in enumerate(self.layout.groups):
            for number, layer in enumerate(group.layers):
                hooks.before(layer, batch)
                steps = list(zip(rows, starts, plan.num_drafts.tolist(), strict=True))
                if group.keeps_encoded:
                    self._cross(plan, rows, index, number)
                    steps = []
                for resident, (start, count), _ in steps if group.keeps_states else ():
                    self._read(resident, index, number, start, count)
                # all of a layer is written before it is read: rows of one step may share a prefix
                for resident, (start, count), drafts in steps:
                    self._write(resident, index, number, start, count + drafts)
                for resident, (start, count), _ in () if group.keeps_states else steps:
                    self._read(resident, index, number, start, count)
                hooks.after(layer, batch)
                yield
                if plan.step in self.broken_steps:
                    return

    def _cross(self, plan: StepPlan, rows: Sequence[Resident], group: int, number: int) -> None:
        """Writes the encoder tokens of those who enter; all read their own."""
        places = {id(one): self._places(one, group, range(len(one.encoded))) for one in rows}
        for new in plan.added:
            one = self.slots[new.slot]
            self._expect(
                bool(places[id(one)][0].all()), f"{one.request_id}: an encoder token is written to the null block"
            )
            prefixes = [BAD] * len(one.encoded) if one.spoiled else one.encoded
            written = self.memory.wanted(group, number, range(len(prefixes)), prefixes)
            self.memory.store(group, number, places[id(one)], written)
        for one in rows:
            wanted = self.memory.wanted(group, number, range(len(one.encoded)), one.encoded)
            if not (one.spoiled or (self.memory.found(group, number, *places[id(one)]) == wanted).all()):
                self._expect(False, f"{one.request_id} reads encoder tokens that are not its own")
                one.spoiled = True

    def _write(self, resident: Resident, group: int, number: int, start: int, count: int) -> None:
        """Stores a row's new entries; those of drafts stand for the prefixes that they would make."""
        prefixes = resident.prefixes[start : start + count]
        drafts = (resident.drafts + [0] * count)[: count - len(prefixes)]  # a plan may reserve more than there are
        for draft in drafts:
            prefixes.append(extend_prefix(prefixes[-1], draft))
        if resident.spoiled:
            prefixes = [BAD] * count
        positions = range(start, start + count)
        if self.layout.groups[group].keeps_states:
            positions, prefixes = positions[-1:], prefixes[-1:]
        blocks, offsets = self._places(resident, group, positions)
        self._expect(bool(blocks.all()), f"{resident.request_id}: a token is written to the null block")
        self.memory.store(group, number, (blocks, offsets), self.memory.wanted(group, number, positions, prefixes))

    def _read(self, resident: Resident, group: int, number: int, start: int, count: int) -> None:
        """A row's entries must be those of its own prefix; a state is read before it is written, at `start` - 1."""
        of = self.layout.groups[group]
        needed = range(of.specs[0].first_needed(start), start + count)
        if of.keeps_states:
            needed = range(max(start - 1, 0), start)
        blocks, offsets = self._places(resident, group, needed)
        found = self.memory.found(group, number, blocks, offsets)
        wanted = self.memory.wanted(group, number, needed, resident.prefixes[needed.start : needed.stop])
        if resident.spoiled or (found == wanted).all():
            return
        wrong = int(np.flatnonzero((found != wanted).any(1))[0])
        bad = (found[:, 2] == BAD) & (found[:, :2] == wanted[:, :2]).all(1)
        position = needed[wrong]
        self._expect(
            bool(blocks[wrong]), f"{resident.request_id} needs position {position}, whose block was given back"
        )
        self._expect(bool(bad.any()), f"{resident.request_id} reads {found[wrong]} at position {position}")
        resident.spoiled = True
        if not of.keeps_states:
            self._write(resident, group, number, start, count)

    def _places(self, resident: Resident, group: int, positions: range) -> tuple[np.ndarray, np.ndarray]:
        where, table = np.array(positions, np.int64), np.array(resident.tables[group], np.int64)
        size = self.layout.groups[group].block_size
        if self.layout.groups[group].keeps_states:  # it has one block
            return table[where * 0], where * 0
        return table[where // size], where % size

    def _draw_rows(self, plan: StepPlan, rows: Sequence[Resident], starts: Sequence[tuple[int, int]]) -> StepResult:
        tokens = np.full((len(rows), 1 + self.most_drafts), -1, np.int32)
        counts, checked, following = np.zeros((3, len(rows)), np.int32)
        prompts = {}
        for row, (resident, (start, count)) in enumerate(zip(rows, starts, strict=True)):
            resident.num_computed = start + count
            samples = resident.num_computed == len(resident.tokens)
            self._expect(samples == bool(plan.samples[row]), f"{resident.request_id} samples: {samples}")
            end = min(start + count, resident.prompt_len - 1)
            if resident.prompt_logprobs and start < end:
                ids = np.array(resident.tokens[start + 1 : end + 1], np.int32)
                values = -ids[:, None].astype(np.float32)
                prompts[row] = LogprobRows(token_ids=ids[:, None], logprobs=values, ranks=np.ones(len(ids), np.int32))
            if plan.samples[row]:
                checked[row] = min(int(plan.num_drafts[row]), len(resident.drafts))
                drawn = self._draw(resident, int(checked[row]))
                tokens[row, : len(drawn)], counts[row] = drawn, len(drawn)
                following[row] = self._guess(resident)
        result = StepResult(step=plan.step, token_ids=tokens, num_tokens=counts, prompt_logprobs=prompts)
        if self.most_drafts:
            result.num_drafts, result.num_next_drafts = checked, following
        return result

    def _draw(self, resident: Resident, num_drafts: int) -> list[int]:
        """Adds one token, and one more for each of the drafts that hold; keys and values of those are there."""
        drawn: list[int] = []
        for draft in [*resident.drafts[:num_drafts], None]:
            right = next_token(resident.prefixes[-1], resident.seed, self.vocab)
            resident.append(WRONG_TOKEN if resident.spoiled else right)
            drawn.append(resident.tokens[-1])
            if drawn[-1] != draft:
                break
            resident.num_computed += 1
        return drawn

    def _guess(self, resident: Resident) -> int:
        """Drafts behind its newest token, right up to some place; returns how many."""
        prefix, resident.drafts = resident.prefixes[-1], []
        for _ in range(self.luck.randrange(self.most_drafts + 1)):
            right = next_token(prefix, resident.seed, self.vocab)
            resident.drafts.append(right if self.luck.random() < 0.7 else (right + 1) % self.vocab)
            prefix = extend_prefix(prefix, resident.drafts[-1])
        return len(resident.drafts)


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
