"""A scheduler over a strict fake worker, with steps in flight between them.

A wrong block, slot or count is an error at once, and any mistake that the checks miss still changes the output.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from frame.core.config.tree import FrameConfig
from frame.core.engine.schedule.scheduler import Scheduler
from frame.core.interfaces.connector import NullConnectorScheduler
from frame.core.interfaces.engine import EngineOutput, EngineRequest
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.scheduling import SchedulerPolicy
from frame.core.interfaces.step import StepPlan, StepResult
from frame.kv_events.events import NO_EVENTS, CacheEvents
from frame.plugins.schedulers.fcfs import FirstComeFirstServedPolicy
from frame.testing import make_setup
from frame.testing.engines import no_grammars
from frame.testing.fake_cache import make_layout as layout_of, next_token, prefixes_of
from frame.testing.fake_worker import BrokenStepError, FakeWorker
from tests.engine.fake_connector import FakeConnector

VOCAB = 12
SPEC = {"num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}


def make_layout(
    num_blocks: int,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    strides: Sequence[int] = (),
    states: int = 0,
    checkpoints: int = 0,
    encodes: bool = False,
) -> KVLayout:
    """As that of `frame.testing`, a layer in each group; None is a full window."""
    given = [one or 0 for one in windows]
    more = {"states": states, "checkpoints": checkpoints, "encodes": encodes}
    return layout_of(num_blocks, block_size, given, layers=1, strides=strides, **more)


def expected(request: EngineRequest, max_model_len: int) -> tuple[list[int], str]:
    """The output of an undisturbed run and why it ended."""
    tokens = [*request.prompt_ids.tolist(), *request.output_ids]
    limit = min(len(request.prompt_ids) + request.max_tokens, max_model_len)
    encoded = prefixes_of([] if request.encoder_ids is None else request.encoder_ids.tolist())
    params, out = request.params, []
    while True:
        token = next_token(prefixes_of(tokens, encoded[-1] if encoded else 0)[-1], request.seed, VOCAB)
        out.append(token)
        tokens.append(token)
        if len(tokens) - len(request.prompt_ids) >= params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return out, "stop"
            if token in params.stop_token_ids:
                return out, "stop"
        if len(tokens) >= limit:
            return out, "length"


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


def run_step(worker: FakeWorker, plan: StepPlan) -> StepResult | None:
    """What a step gives; None when it breaks."""
    try:
        worker.execute(plan)
    except BrokenStepError:
        return None
    return worker.sample().results()[0]


class Simulation:
    """A scheduler and a fake worker with up to `max_in_flight` steps between them."""

    def __init__(
        self,
        *,
        layout: KVLayout,
        max_model_len: int = 64,
        max_in_flight: int = 2,
        connector: FakeConnector | None = None,
        policy: type[SchedulerPolicy] = FirstComeFirstServedPolicy,
        seed: int = 0,
        events: CacheEvents = NO_EVENTS,
        **flat: object,
    ) -> None:
        self.config = make_config(**{"max_num_seqs": 128, "max_num_batched_tokens": 2048, **flat})
        self.layout = layout
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight
        self.scheduler = Scheduler(
            config=self.config,
            layout=layout,
            policy=policy(make_setup("scheduler", config=self.config)),
            connector=connector or NullConnectorScheduler(make_setup("connector", config=self.config, layout=layout)),
            max_model_len=max_model_len,
            max_in_flight=max_in_flight,
            compiler=no_grammars(),
            events=events,
        )
        speculation = self.config.speculation
        self.broken: set[int] = set()  # steps that raise
        self.worker = FakeWorker(
            layout,
            connector.worker_side if connector else None,
            self.broken,
            strict=True,
            vocab=VOCAB,
            most_drafts=speculation.num_speculative_tokens if speculation.speculator else 0,
            luck=random.Random(seed),
        )
        self.worker.allocate(layout)
        if connector is not None:
            connector.worker = self.worker
        self.in_flight: list[tuple[StepPlan, StepResult | None]] = []
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.outputs[request.request_id] = []

    def launch(self, *, breaks: bool = False, refused: bool = False) -> StepPlan | None:
        """Plans and executes a step. It may break (its answer is an error) or be refused (the worker never sees it)."""
        plan = self.scheduler.schedule()
        if plan is not None:
            limits = self.config.scheduler
            encoded = sum(len(new.encoder_ids) for new in plan.added if new.encoder_ids is not None)
            assert plan.num_tokens + encoded <= limits.max_num_batched_tokens
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
            self.in_flight.append((plan, run_step(self.worker, plan)))
            self.check_references()
        return plan

    def answer(self) -> list[EngineOutput]:
        plan, result = self.in_flight.pop(0)
        self.worker.answered(plan)
        if plan.step in self.broken or result is None:
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
        self.scheduler.use_pause()
        return True

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("the simulation does not end")
        assert not self.scheduler.lifecycle.requests, "requests are left but nothing is planned"
        while self.scheduler.lifecycle.kept.drop():
            pass
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
        lifecycle, pool = self.scheduler.lifecycle, self.scheduler._kv.pool
        owners = [*lifecycle.requests.values(), *lifecycle._draining.values()]
        owners += [*lifecycle.held.values(), *lifecycle.loading.values(), *lifecycle.abandoned.values()]
        owners += lifecycle.kept._requests.values()
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
        if not self.scheduler.lifecycle.abandoned:
            assert pool.num_free == pool.num_blocks - 1
        assert batch.slots.num_free == batch.slots.num_slots
        assert not batch.slots._retired
        assert len(batch) == 0
        assert not self.scheduler.lifecycle._draining
        assert not self.scheduler.lifecycle.held
        assert not self.scheduler.lifecycle.loading
        assert not self.scheduler.lifecycle.launched
