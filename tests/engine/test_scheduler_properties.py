"""Random lives of requests against an undisturbed run: same tokens, no leak, no wrong block, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.sampling import SamplingParams
from frame.kv_events.events import NO_EVENTS, CacheEvents
from frame.plugins.schedulers.fair import FairPolicy
from frame.plugins.schedulers.fcfs import FirstComeFirstServedPolicy
from frame.plugins.schedulers.priority import PriorityPolicy
from frame.testing.fake_cache import WRONG_TOKEN
from tests.engine.fake_connector import FakeConnector
from tests.engine.simulation import VOCAB, Simulation, expected, make_layout, make_request

MAX_LEN = 40
ENCODED = ([1], [1] * 7, [1] * 8, [2, 3, 4] * 10)
POLICIES = (FirstComeFirstServedPolicy, PriorityPolicy, FairPolicy)

setups = st.fixed_dictionaries(
    {
        "windows": st.sampled_from([(None,), (None, 6), (5,), (None, 3, 9), (8, 8)]),
        "block_size": st.sampled_from([1, 2, 4]),
        "strides": st.sampled_from([(1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 4), (4, 2, 3)]),
        "holds_states": st.sampled_from([False, False, True]),
        "checkpoints": st.sampled_from([0, 1, 6]),
        "encodes": st.sampled_from([False, False, True]),
        "roominess": st.sampled_from([1.0, 1.3, 2.0, 6.0]),
        "max_in_flight": st.integers(1, 3),
        "policy": st.sampled_from(POLICIES),
        "max_num_seqs": st.sampled_from([1, 2, 4, 8]),
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 40, 64]),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "max_num_partial_prefills": st.integers(1, 3),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 4]),
    }
)
operations = st.lists(
    st.tuples(
        st.sampled_from(["add"] * 3 + ["follow"] * 2 + ["abort", "reset", "forget"] + ["launch"] * 6 + ["answer"] * 6),
        st.integers(0, 2**32 - 1),
    ),
    max_size=150,
)


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def simulate(
    setup: dict, connector: dict | None = None, events_of: Callable[[KVLayout], CacheEvents] = lambda layout: NO_EVENTS
) -> Simulation:
    setup = dict(setup)
    windows, size, roominess = setup.pop("windows"), setup.pop("block_size"), setup.pop("roominess")
    strides, holds_states = setup.pop("strides")[: len(windows)], setup.pop("holds_states")
    num_blocks = int(sum(-(-MAX_LEN // (size * stride)) for stride in strides) * roominess) + 1
    checkpoints = setup.pop("checkpoints")
    # connectors move copies
    movable = connector is None or (checkpoints > 0 and setup["enable_prefix_caching"])
    states = setup["max_num_seqs"] if holds_states and movable and "speculator" not in setup else 0
    encodes = setup.pop("encodes", False) and connector is None
    layout = make_layout(num_blocks, size, windows, strides, states, checkpoints, encodes)
    if connector is not None:
        connector = dict(connector)
        setup["kv_load_failure_policy"] = connector.pop("policy", "recompute")
    made = None if connector is None else FakeConnector(layout=layout, **connector)
    return Simulation(layout=layout, max_model_len=MAX_LEN, connector=made, events=events_of(layout), **setup)


def random_request(number: int, rng: random.Random, encodes: bool = False):
    shared = rng.choice([[1] * 30, [2, 3] * 15, [4, 5, 6] * 10])
    length = rng.randrange(1, 32)
    own = rng.randrange(0, length + 1)
    prompt = shared[: length - own] + [rng.randrange(VOCAB) for _ in range(own)]
    prompt += [rng.randrange(VOCAB)] * (length - len(prompt))
    max_tokens = rng.randrange(1, 14)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randrange(0, max_tokens + 1),
        stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.3 else None,
        ignore_eos=rng.random() < 0.3,
        prompt_logprobs=1 if rng.random() < 0.1 else None,
    )
    return make_request(
        f"r{number}",
        prompt,
        max_tokens,
        eos=(7,),
        params=params,
        seed=rng.randrange(3),
        priority=rng.randrange(3),
        owner=rng.choice("abc"),
        arrival=float(number),
        output_ids=[rng.randrange(VOCAB) for _ in range(rng.randrange(0, 3))] if rng.random() < 0.1 else [],
        follows="" if rng.random() < 0.4 else None,
        encoder_ids=np.array(rng.choice(ENCODED), np.int32) if encodes else None,
    )


class Life:
    """Applies operations to a simulation and remembers what was added and aborted."""

    def __init__(self, sim: Simulation, breaks: float = 0.0) -> None:
        self.sim, self.breaks = sim, breaks
        self.may_fail = breaks > 0 or sim.config.transfer.kv_load_failure_policy == "fail"
        self.requests: dict[str, object] = {}
        self.aborted: set[str] = set()

    def apply(self, operation: str, seed: int) -> None:
        sim, rng = self.sim, random.Random(seed)
        if operation == "add" and len(self.requests) < 40:
            request = random_request(len(self.requests), rng, any(one.keeps_encoded for one in sim.layout.groups))
            try:
                sim.add(request)
            except ValueError:
                return
            self.requests[request.request_id] = request
        elif operation == "follow" and len(self.requests) < 40:
            self.follow(rng)
        elif operation == "forget":
            sim.scheduler.lifecycle.kept.drop(rng.choice([None, *self.requests]))
        elif operation == "abort" and self.requests:
            name = rng.choice(list(self.requests))
            self.aborted |= {output.request_id for output in sim.collect(sim.scheduler.abort([name]))}
        elif operation == "reset":
            if rng.random() < 0.7:
                sim.scheduler.preempt_all()
            sim.scheduler.reset_prefix_cache()
        elif operation == "launch":
            if len(sim.in_flight) < sim.max_in_flight:
                sim.launch(breaks=rng.random() < self.breaks, refused=rng.random() < self.breaks / 2)
        elif operation == "answer" and sim.in_flight:
            sim.answer()

    def follow(self, rng: random.Random) -> None:
        """The next piece of a session: it begins with the tokens of the one before but the last, or nearly so."""
        ended = [
            one
            for one in self.requests.values()
            if one.follows is not None and self.sim.reason(one.request_id) in ("stop", "length")
        ]
        if not ended:
            return
        before = rng.choice(ended)
        tokens = [*before.prompt_ids.tolist(), *before.output_ids, *self.sim.tokens(before.request_id)][:-1]
        if rng.random() < 0.1:
            del tokens[rng.randrange(len(tokens)) :]
        piece = [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 9))]
        number, follows = len(self.requests), before.request_id
        request = make_request(
            f"r{number}", [*tokens, *piece], rng.randrange(1, 9), seed=rng.randrange(3), arrival=float(number),
            follows=follows, encoder_ids=before.encoder_ids,
        )  # fmt: skip
        try:
            self.sim.add(request)
        except ValueError:
            return
        self.requests[request.request_id] = request

    def check(self) -> None:
        self.sim.run()
        for name, request in self.requests.items():
            tokens = self.sim.tokens(name)
            assert WRONG_TOKEN not in tokens
            if name in self.aborted:
                assert self.sim.reason(name) == "abort"
            elif not self.may_fail or self.sim.reason(name) != "error":
                self.sim.check(request)
            assert tokens == expected(request, MAX_LEN)[0][: len(tokens)]
            self.check_prompt_logprobs(request, self.sim.reason(name) in ("stop", "length"))

    def check_prompt_logprobs(self, request, complete: bool) -> None:
        if request.params.prompt_logprobs is None:
            return
        outputs = self.sim.outputs[request.request_id]
        seen = [i for o in outputs if o.prompt_logprobs is not None for i in o.prompt_logprobs.token_ids[:, 0].tolist()]
        wanted = request.prompt_ids.tolist()[1:]
        assert seen == (wanted if complete else wanted[: len(seen)])


@examples(120)
@given(setup=setups, script=operations)
def test_every_request_gets_the_tokens_of_an_undisturbed_run(setup, script):
    life = Life(simulate(setup))
    for operation, seed in script:
        life.apply(operation, seed)
    life.check()


@examples(60)
@given(setup=setups, script=operations)
def test_a_broken_step_ends_its_own_requests_and_spoils_no_other(setup, script):
    life = Life(simulate(setup), breaks=0.15)
    for operation, seed in script:
        life.apply(operation, seed)
    life.check()


connectors = st.fixed_dictionaries(
    {
        "later": st.booleans(),
        "hold": st.booleans(),
        "failing": st.lists(st.integers(0, 12), max_size=6),
        "shy": st.integers(0, 3),
        "ends": st.booleans(),
        "by_tokens": st.booleans(),
        "policy": st.sampled_from(["recompute", "recompute", "fail"]),
    }
)


@examples(80)
@given(setup=setups, connector=connectors, script=operations)
def test_loads_and_holds_change_no_token_and_leak_no_block(setup, connector, script):
    life = Life(simulate(setup, connector))
    for operation, seed in script:
        life.apply(operation, seed)
    life.check()
    assert sorted(life.sim.scheduler._transfers.connector.ended) == sorted(life.requests)


@pytest.mark.some(8)
@pytest.mark.parametrize("seed", range(30))
def test_loads_and_holds_of_states_change_no_token_and_leak_no_block(seed):
    rng = random.Random(seed)
    always = {"holds_states": True, "checkpoints": rng.choice([1, 6]), "enable_prefix_caching": True}
    connector = {
        "later": rng.random() < 0.5,
        "hold": rng.random() < 0.5,
        "failing": [number for number in range(40) if rng.random() < 0.3],
        "shy": 0,
        "policy": rng.choice(["recompute", "recompute", "fail"]),
    }
    sim = simulate({**random_setup(rng), **always}, connector)
    live(Life(sim, rng.choice([0.0, 0.0, 0.05])), rng, 200)
    made = sim.scheduler._transfers.connector
    assert all(made.states_named)


def random_setup(rng: random.Random) -> dict:
    return {
        "windows": rng.choice([(None,), (None, 6), (5,), (None, 3, 9), (8, 8)]),
        "block_size": rng.choice([1, 2, 4]),
        "strides": rng.choice([(1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 4), (4, 2, 3)]),
        "holds_states": rng.random() < 0.3,
        "checkpoints": rng.choice([0, 1, 6]),
        "encodes": rng.random() < 0.4,
        "roominess": rng.choice([1.0, 1.3, 2.0, 6.0]),
        "max_in_flight": rng.randrange(1, 4),
        "policy": rng.choice(POLICIES),
        "max_num_seqs": rng.choice([1, 2, 4, 8]),
        "max_num_batched_tokens": rng.choice([1, 3, 8, 16, 40, 64]),
        "enable_prefix_caching": rng.random() < 0.7,
        "enable_chunked_prefill": rng.random() < 0.8,
        "max_num_partial_prefills": rng.randrange(1, 4),
        "long_prefill_token_threshold": rng.choice([0, 4]),
    }


def live(life: Life, rng: random.Random, count: int) -> None:
    names = ["add"] * 4 + ["follow"] * 3 + ["abort", "reset", "forget"] + ["launch"] * 6 + ["answer"] * 6
    for _ in range(count):
        life.apply(rng.choice(names), rng.randrange(2**32))
    life.check()


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_behind_an_encoder_is_of_its_prompt(seed):
    rng = random.Random(seed)
    always = {"encodes": True, "enable_prefix_caching": True, "holds_states": False, "max_num_batched_tokens": 16}
    live(Life(simulate({**random_setup(rng), **always})), rng, 150)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 4000, 500))
def test_thousands_of_random_requests_get_their_tokens(start):
    for seed in range(start, start + 500):
        rng = random.Random(seed)
        setup = random_setup(rng)
        if rng.random() < 0.5:
            setup |= {"speculator": "luck", "num_speculative_tokens": rng.randrange(1, 6), "seed": seed}
        connector = None
        if rng.random() < 0.5:
            failing = [rng.randrange(12) for _ in range(rng.randrange(5))]
            connector = {"later": rng.random() < 0.5, "hold": rng.random() < 0.5, "failing": failing, "shy": 2}
            connector["ends"] = rng.random() < 0.5
            connector["by_tokens"] = rng.random() < 0.5
        live(Life(simulate(setup, connector), breaks=rng.choice([0.0, 0.1])), rng, 200)


drafting = st.fixed_dictionaries(
    {"num_speculative_tokens": st.integers(1, 5), "disable_by_batch_size": st.sampled_from([None, None, 1, 3])}
)


@examples(120)
@given(setup=setups, speculation=drafting, script=operations, seed=st.integers(0, 99))
def test_drafts_change_no_tokens(setup, speculation, script, seed):
    life = Life(simulate({**setup, **speculation, "speculator": "luck", "seed": seed}))
    for operation, number in script:
        life.apply(operation, number)
    life.check()


@examples(60)
@given(setup=setups, speculation=drafting, script=operations, seed=st.integers(0, 99))
def test_drafts_change_no_tokens_when_steps_fail(setup, speculation, script, seed):
    life = Life(simulate({**setup, **speculation, "speculator": "luck", "seed": seed}), breaks=0.15)
    for operation, number in script:
        life.apply(operation, number)
    life.check()
