"""A worker whose KV cache is a table of facts, so that a wrong block, slot or count is an error at once.

Each cached entry says which prefix it stands for. A row may only read entries of its own prefix; its next token is a
function of that prefix, so any mistake that the checks miss still changes the output.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frame.core.config.tree import FrameConfig
from frame.core.engine.schedule.scheduler import Scheduler
from frame.core.interfaces.connector import NullConnectorScheduler
from frame.core.interfaces.engine import EngineOutput, EngineRequest
from frame.core.interfaces.kv import FullKV, KVGroup, KVLayout, SlidingKV, StateKV
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import LogprobRows, StepPlan, StepResult
from frame.plugins.schedulers.fcfs import FirstComeFirstServedPolicy
from frame.plugins.schedulers.priority import PriorityPolicy
from frame.testing import make_setup

VOCAB = 12
BAD = -1  # the fingerprint of an entry that was never written properly
GARBAGE = 99  # the token that comes of reading one
SPEC = {"num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}


def chain(parent: int, token: int) -> int:
    """A fingerprint of a prefix, extended by one token."""
    return int.from_bytes(hashlib.blake2b(f"{parent},{token}".encode(), digest_size=8).digest(), "big")


def fingerprints(tokens: list[int]) -> list[int]:
    prints, last = [], 0
    for token in tokens:
        last = chain(last, token)
        prints.append(last)
    return prints


def draw(fingerprint: int, seed: int) -> int:
    return chain(fingerprint, seed) % VOCAB


def expected(request: EngineRequest, max_model_len: int) -> tuple[list[int], str]:
    """The output of an undisturbed run and why it ended."""
    tokens = [*request.prompt_ids.tolist(), *request.output_ids]
    limit = min(len(request.prompt_ids) + request.max_tokens, max_model_len)
    params, out = request.params, []
    last = fingerprints(tokens)[-1]
    while True:
        token = draw(last, request.seed)
        last = chain(last, token)
        out.append(token)
        tokens.append(token)
        if len(tokens) - len(request.prompt_ids) >= params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return out, "stop"
            if token in params.stop_token_ids:
                return out, "stop"
        if len(tokens) >= limit:
            return out, "length"


@dataclass
class Resident:
    """A request in a slot."""

    request_id: str
    tokens: list[int]
    prints: list[int]
    seed: int
    prompt_len: int
    max_len: int
    num_computed: int
    tables: list[list[int]]
    prompt_logprobs: bool = False
    spoiled: bool = False
    drafts: list[int] = field(default_factory=list)  # proposed after its newest token


@dataclass
class FakeWorker:
    layout: KVLayout
    num_slots: int
    strict: bool = True  # False when failed steps may repeat removals
    slots: dict[int, Resident] = field(default_factory=dict)
    memory: dict[int, dict[int, tuple[int, int, int]]] = field(default_factory=dict)  # block → offset → entry
    states: dict[int, tuple[int, int]] = field(default_factory=dict)  # block → tokens, fingerprint
    transfer: Any = None  # a FakeTransferWorker
    unanswered: list[StepPlan] = field(default_factory=list)
    most_drafts: int = 0  # 0: no speculator
    luck: random.Random = field(default_factory=random.Random)  # how many drafts there are, and how many of them hold

    def execute(self, plan: StepPlan, *, spoiled: bool = False) -> StepResult:
        """Runs a step; a `spoiled` one (its answer will be an error) leaves garbage in all that it writes."""
        self._change_state(plan)
        if self.transfer is not None:
            self.transfer.begin_step(plan.extras.get("connector", b""))
        rows = [(self.slots[slot], n) for slot, n in zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True)]
        assert len({id(resident) for resident, _ in rows}) == len(rows)
        planned = plan.num_drafts.tolist()
        for row, ((resident, n), computed) in enumerate(zip(rows, plan.num_computed.tolist(), strict=True)):
            if self.most_drafts:
                assert computed >= resident.num_computed, "fewer tokens are taken as computed than are"
            else:
                assert computed == resident.num_computed, (resident.request_id, computed, resident.num_computed)
            n -= planned[row]
            assert not planned[row] or (n == 1 and planned[row] <= self.most_drafts)
            assert resident.num_computed + n <= len(resident.tokens), "a token that does not exist is computed"
            assert computed + n + planned[row] < resident.max_len, "a token past the last is planned"
            rows[row] = resident, n
            resident.spoiled |= spoiled
            self._read_states(resident)
            self._write(resident, resident.num_computed, n)
            self._write_drafts(resident, planned[row])
        tokens = np.full((len(rows), 1 + self.most_drafts), -1, np.int32)
        counts, checked, following = np.zeros((3, len(rows)), np.int32)
        prompts = {}
        for row, (resident, n) in enumerate(rows):
            self._check_reads(resident, n)
            start = resident.num_computed
            resident.num_computed += n
            samples = resident.num_computed == len(resident.tokens)
            assert samples == bool(plan.samples[row])
            if resident.prompt_logprobs and start < resident.prompt_len - 1:
                end = min(start + n, resident.prompt_len - 1)
                ids = np.array(resident.tokens[start + 1 : end + 1], np.int32)
                prompts[row] = LogprobRows(
                    token_ids=ids[:, None], logprobs=-ids[:, None].astype(np.float32), ranks=np.ones(len(ids), np.int32)
                )
            if samples:
                checked[row] = min(planned[row], len(resident.drafts))
                drawn = self._draw(resident, int(checked[row]))
                tokens[row, : len(drawn)], counts[row] = drawn, len(drawn)
                following[row] = self._guess(resident)
        self.unanswered.append(plan)
        report = None if self.transfer is None or spoiled else self.transfer.end_step(plan.finished_ids)
        result = StepResult(
            step=plan.step, token_ids=tokens, num_tokens=counts, prompt_logprobs=prompts, transfer=report
        )
        if self.most_drafts:
            result.num_drafts, result.num_next_drafts = checked, following
        return result

    def _draw(self, resident: Resident, num_drafts: int) -> list[int]:
        """Adds one token, and one more for each of the drafts that hold; keys and values of those are there."""
        drawn: list[int] = []
        for draft in [*resident.drafts[:num_drafts], None]:
            token = GARBAGE if resident.spoiled else draw(resident.prints[-1], resident.seed)
            resident.tokens.append(token)
            resident.prints.append(chain(resident.prints[-1], token))
            drawn.append(token)
            if token != draft:
                break
            resident.num_computed += 1
        return drawn

    def _guess(self, resident: Resident) -> int:
        """Drafts behind its newest token, right up to some place; returns how many."""
        prints, resident.drafts = resident.prints[-1], []
        for _ in range(self.luck.randrange(self.most_drafts + 1)):
            right = draw(prints, resident.seed)
            resident.drafts.append(right if self.luck.random() < 0.7 else (right + 1) % VOCAB)
            prints = chain(prints, resident.drafts[-1])
        return len(resident.drafts)

    def _write_drafts(self, resident: Resident, count: int) -> None:
        """The keys and values of drafts stand for the prefixes that they would make."""
        known = len(resident.tokens)
        given = (resident.drafts + [0] * count)[:count]  # the plan may reserve more than there are
        for offset, draft in enumerate(given):
            resident.prints.append(chain(resident.prints[-1], draft))
            self._write(resident, known + offset, 1)
        del resident.prints[known:]

    def answered(self, plan: StepPlan) -> None:
        self.unanswered.remove(plan)

    def _change_state(self, plan: StepPlan) -> None:
        for slot in plan.removed_slots.tolist():
            assert slot in self.slots or not self.strict, f"slot {slot} removed twice"
            self.slots.pop(slot, None)
        for new in plan.added:
            assert 0 <= new.slot < self.num_slots
            assert new.slot not in self.slots, f"slot {new.slot} is taken"
            for earlier in self.unanswered:
                assert new.slot not in earlier.slots.tolist(), f"slot {new.slot} is still named by step {earlier.step}"
            tokens = new.token_ids.tolist()
            assert new.num_computed < len(tokens)
            assert new.token_ids.dtype == np.int32
            self.slots[new.slot] = Resident(
                new.request_id,
                tokens,
                fingerprints(tokens),
                new.seed,
                new.prompt_len,
                new.prompt_len + new.params.max_tokens,
                new.num_computed,
                [blocks.tolist() for blocks in new.block_ids],
                new.params.prompt_logprobs is not None,
            )
        for append in plan.appends:
            for slot, offset, block in zip(append.slots, append.offsets, append.block_ids, strict=True):
                table = self.slots[slot].tables[append.group]
                assert offset == len(table)
                table.append(int(block))
        live = [slot for slot in plan.slots.tolist() if slot not in self.slots]
        assert not live

    def _write(self, resident: Resident, start: int, n: int) -> None:
        for index, group in enumerate(self.layout.groups):
            if group.keeps_states:
                (block,) = resident.tables[index]
                last = BAD if resident.spoiled or not start + n else resident.prints[start + n - 1]
                self.states[block] = (start + n, last)
                continue
            size = group.block_size
            for position in range(start, start + n):
                block = resident.tables[index][position // size]
                assert block != 0, "a token is written to the null block"
                entry = (index, position, BAD if resident.spoiled else resident.prints[position])
                self.memory.setdefault(block, {})[position % size] = entry

    def _check_reads(self, resident: Resident, n: int) -> None:
        start = resident.num_computed
        for index, group in enumerate(self.layout.groups):
            if group.keeps_states:
                continue  # read before it was written
            size = group.block_size
            for position in range(group.specs[0].first_needed(start), start + n):
                block = resident.tables[index][position // size]
                assert block != 0, f"{resident.request_id} needs position {position}, whose block was given back"
                entry = self.memory.get(block, {}).get(position % size)
                if entry == (index, position, BAD):
                    self._spoil(resident, start, n)
                    return
                assert entry == (index, position, resident.prints[position]), (
                    f"{resident.request_id} reads {entry} at position {position} of group {index}"
                )

    def _read_states(self, resident: Resident) -> None:
        """The state of a request that goes on is that of its own prefix; one that begins reads none."""
        start = resident.num_computed
        for index, group in enumerate(self.layout.groups):
            if group.keeps_states and start:
                (block,) = resident.tables[index]
                found = self.states[block]
                resident.spoiled |= found == (start, BAD)
                assert resident.spoiled or found == (start, resident.prints[start - 1]), "another's state is read"

    def _spoil(self, resident: Resident, start: int, n: int) -> None:
        """It read what a failed load or step left, so all that it computes is wrong from now on."""
        resident.spoiled = True
        self._write(resident, start, n)


def make_layout(
    num_blocks: int,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    strides: Sequence[int] = (),
    states: int = 0,
) -> KVLayout:
    """A group for each window (None: a full one) with `strides[g]` times as long blocks; one of `states` requests."""
    strides = strides or [1] * len(windows)
    groups = [
        KVGroup(
            specs=(FullKV(**SPEC) if window is None else SlidingKV(**SPEC, window=window),),
            layers=(f"layer{i}",),
            block_size=block_size * stride,
        )
        for i, (window, stride) in enumerate(zip(windows, strides, strict=True))
    ]
    if states:
        groups.append(KVGroup(specs=(StateKV(state_bytes=64),), layers=("state",), block_size=0, pool=1))
    return KVLayout(
        groups=tuple(groups),
        pools=(num_blocks, states + 1) if states else (num_blocks,),
        block_size=block_size,
        grain=block_size * math.lcm(*strides),
        numerics="test numerics",
        model="test",
    )


def make_config(**flat: object) -> FrameConfig:
    """A configuration from leaf names."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in flat.items():
        home = next(s for s, f in FrameConfig.model_fields.items() if name in getattr(f.annotation, "model_fields", ()))
        sections.setdefault(home, {})[name] = value
    return FrameConfig.model_validate(sections)


def make_request(
    request_id: str, prompt: list[int], max_tokens: int = 8, *, eos: tuple[int, ...] = (), **fields: object
) -> EngineRequest:
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return EngineRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt, np.int32),
        params=params,
        max_tokens=max_tokens,
        seed=fields.pop("seed", 1),
        eos_token_ids=list(eos),
        **fields,
    )


class Simulation:
    """A scheduler and a fake worker with up to `max_in_flight` steps between them."""

    def __init__(
        self,
        *,
        layout: KVLayout,
        max_model_len: int = 64,
        max_in_flight: int = 2,
        connector: Any = None,
        priority: bool = False,
        seed: int = 0,
        **flat: object,
    ) -> None:
        self.config = make_config(**{"max_num_seqs": 128, "max_num_batched_tokens": 2048, **flat})
        self.layout = layout
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight
        policy = PriorityPolicy if priority else FirstComeFirstServedPolicy
        self.scheduler = Scheduler(
            config=self.config,
            layout=layout,
            policy=policy(make_setup("scheduler", config=self.config)),
            connector=connector or NullConnectorScheduler(make_setup("connector", config=self.config, layout=layout)),
            max_model_len=max_model_len,
            max_in_flight=max_in_flight,
        )
        speculation = self.config.speculation
        self.worker = FakeWorker(
            layout,
            self.config.scheduler.max_num_seqs,
            most_drafts=speculation.num_speculative_tokens if speculation.speculator else 0,
            luck=random.Random(seed),
        )
        if connector is not None:
            self.worker.transfer = connector.attach(self.worker.memory)
        self.in_flight: list[tuple[StepPlan, StepResult]] = []
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.broken: set[int] = set()  # steps that raise

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.outputs[request.request_id] = []

    def launch(self, *, breaks: bool = False, refused: bool = False) -> StepPlan | None:
        """Plans and executes a step. It may break (its answer is an error) or be refused (the worker never sees it)."""
        plan = self.scheduler.schedule()
        if plan is not None:
            limits = self.config.scheduler
            assert plan.num_tokens <= limits.max_num_batched_tokens
            assert len(plan.slots) <= limits.max_num_seqs
            assert len(self.in_flight) < self.max_in_flight
            self.plans.append(plan)
            if refused:
                self.worker.strict = False
                self.collect(self.scheduler.fail(plan, "the step was refused"))
                return plan
            if breaks:
                self.broken.add(plan.step)
                self.worker.strict = False
            self.in_flight.append((plan, self.worker.execute(plan, spoiled=breaks)))
            self.check_references()
        return plan

    def answer(self) -> list[EngineOutput]:
        plan, result = self.in_flight.pop(0)
        self.worker.answered(plan)
        if plan.step in self.broken:
            return self.collect(self.scheduler.fail(plan, "the step broke"))
        return self.collect(self.scheduler.update(plan, result))

    def collect(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        for output in outputs:
            seen = self.outputs[output.request_id]
            assert not seen or seen[-1].finish_reason is None, "an output after the last one"
            seen.append(output)
        return outputs

    def step(self) -> bool:
        """Launches as much as may be in flight, then answers the oldest; False when there is nothing to do."""
        while len(self.in_flight) < self.max_in_flight and self.launch() is not None:
            pass
        if not self.in_flight:
            return False
        self.answer()
        return True

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("the simulation does not end")
        assert not self.scheduler.has_unfinished(), "requests are left but nothing is planned"
        self.check_quiet()

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def reason(self, request_id: str) -> str | None:
        return self.outputs[request_id][-1].finish_reason if self.outputs[request_id] else None

    def check(self, request: EngineRequest) -> None:
        tokens, reason = expected(request, self.max_model_len)
        assert self.tokens(request.request_id) == tokens
        assert self.reason(request.request_id) == reason

    def check_references(self) -> None:
        """Every reference in the pool is an entry of some request's table."""
        lifecycle, pool = self.scheduler._lifecycle, self.scheduler._kv.pool
        owners = [*lifecycle.requests.values(), *lifecycle._draining.values()]
        owners += [*lifecycle.held.values(), *lifecycle.loading.values(), *lifecycle.abandoned.values()]
        states = self.scheduler._kv._states
        for blocks, mine in ((pool, False), *((own, True) for own in states.values())):
            held = Counter(
                block
                for owner in {id(o): o for o in owners}.values()
                for group, table in enumerate(owner.cache.blocks)
                for block in table
                if block and (group in states) == mine
            )
            assert all(blocks.references(block) == held[block] for block in range(1, blocks.num_blocks))
            assert blocks.num_free == blocks.num_blocks - 1 - len(held)

    def check_quiet(self) -> None:
        """Nothing is held at rest."""
        pool, batch = self.scheduler._kv.pool, self.scheduler._batch
        self.check_references()
        if not self.scheduler._lifecycle.abandoned:
            assert pool.num_free == pool.num_blocks - 1
        assert batch.slots.num_free == batch.slots.num_slots
        assert batch.slots.num_retired == 0
        assert len(batch) == 0
        assert not self.scheduler._lifecycle._draining
        assert not self.scheduler._lifecycle.held
        assert not self.scheduler._lifecycle.loading
        assert not self.scheduler._launched
