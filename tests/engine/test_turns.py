"""Owners take turns by tokens: one that asks for much makes nobody else wait for all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine
from frame.core.engine.request import QueueFullError
from frame.interfaces import SchedulerPolicy
from frame.plugins.schedulers.fair import FairPolicy
from frame.plugins.schedulers.fcfs import FirstComeFirstServedPolicy
from frame.testing.engines import fake_engine, request
from frame.testing.fake_cache import expected_tokens, make_layout
from frame.testing.fake_executor import FakeExecutor, FakeWorkers
from frame.testing.fake_worker import FakeWorker
from frame.testing.setups import make_setup
from tests.engine.simulation import Simulation, make_layout as simulated_layout, make_request

SLOTS = 8


class Run:
    """An engine with eight slots, and the step in which each request ended."""

    def __init__(self, policy: type[SchedulerPolicy]) -> None:
        config = from_flat({"max_num_seqs": SLOTS, "max_num_batched_tokens": 64})
        layout = make_layout(200)
        executor = FakeExecutor(
            make_setup("executor", config=config, workers=FakeWorkers(lambda rank: FakeWorker(layout)))
        )
        self.engine: Engine = fake_engine(config, executor, policy(make_setup("scheduler", config=config)), layout)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}
        self.asked: dict[str, Any] = {}
        self.steps = 0

    def add(self, owner: str, count: int, num_tokens: int = 20) -> None:
        for _ in range(count):
            name = f"{owner}{len(self.tokens)}"
            one = self.asked[name] = request(name, [1, 2, len(self.asked) % 90], num_tokens)
            one.owner, one.arrival = owner, float(len(self.tokens))
            self.tokens[name] = []
            self.engine.add(one)

    def step(self) -> None:
        self.steps += 1
        for output in self.engine.step():
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = self.steps

    def finish(self) -> None:
        while self.engine.has_unfinished():
            self.step()
        for name, one in self.asked.items():
            assert self.tokens[name] == expected_tokens(one.prompt_ids.tolist(), one.max_tokens, one.seed), name

    def num_ended(self, owner: str) -> int:
        return len([name for name in self.ends if name.startswith(owner)])


@pytest.fixture
def fair() -> Iterator[Run]:
    run = Run(FairPolicy)
    yield run
    run.engine.close()


def test_a_late_owner_gets_a_slot_at_once(fair: Run) -> None:
    fair.add("a", 80)
    for _ in range(8):
        fair.step()
    fair.add("b", 1)
    began = fair.steps
    while not fair.num_ended("b"):
        fair.step()
    assert fair.steps - began <= 20 + 8, "it waited for requests of another owner"
    fair.finish()


def test_first_come_first_served_makes_a_late_owner_wait_for_all_others() -> None:
    run = Run(FirstComeFirstServedPolicy)
    run.add("a", 80)
    for _ in range(8):
        run.step()
    run.add("b", 1)
    while not run.num_ended("b"):
        run.step()
    assert run.num_ended("a") >= 80 - SLOTS
    run.engine.close()


def test_two_owners_share_evenly(fair: Run) -> None:
    fair.add("a", 40)
    fair.add("b", 20)
    while fair.num_ended("b") < 20:
        fair.step()
    assert 16 <= fair.num_ended("a") <= 28
    fair.finish()
    shares = fair.engine.scheduler.lifecycle.turns._shares
    assert shares == {}, "owners without requests are kept"


def test_requests_that_end_early_cost_what_they_used(fair: Run) -> None:
    fair.add("a", 8, num_tokens=80)
    for _ in range(4):
        fair.step()
    fair.engine.abort([f"a{number}" for number in range(7)])
    for number in range(7):
        del fair.asked[f"a{number}"]
    fair.step()
    requests = fair.engine.scheduler.lifecycle.requests
    fair.add("a", 1)
    fair.add("b", 1)
    assert requests["a8"].turn - requests["b9"].turn < 80
    fair.finish()


def test_a_request_that_was_admitted_in_a_step_gives_way_in_a_later_one() -> None:
    sim = Simulation(layout=simulated_layout(11), policy=FairPolicy)
    requests = [make_request(f"a{number}", [number] * 8, 2, owner="a") for number in range(4)]
    requests += [make_request(f"b{number}", [9 + number] * 8, 30, owner="b") for number in range(2)]
    for one in requests:
        sim.add(one)
    sim.run()
    assert sim.scheduler.stats().preemptions
    for one in requests:
        sim.check(one)


def test_blocks_that_one_owner_has_taken_are_there_for_another_at_once() -> None:
    """The first owner's many outputs were preempted for lack of blocks, and stand before the other's prompt."""
    layout = simulated_layout(150)
    sim = Simulation(layout=layout, policy=FairPolicy, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=400)
    for number in range(256):
        prompt = [number // 64, *[1] * 19]  # four requests of 64 outputs
        sim.add(make_request(f"a{number}", prompt, 80, owner="a", seed=number, arrival=float(number)))
    while sim.scheduler.stats().preemptions < 20:
        sim.step()
    asked = make_request("b", [2] * 300, 4, owner="b", arrival=1e6)
    sim.add(asked)
    began = len(sim.plans)
    while not sim.outputs["b"]:
        sim.step()
        assert len(sim.plans) - began <= 20, "it waits for those that were preempted"
    while sim.scheduler.lifecycle.requests:
        sim.step()
    sim.check(asked)


def test_a_queue_that_one_owner_has_filled_takes_requests_of_another() -> None:
    sim = Simulation(layout=simulated_layout(100), policy=FairPolicy, max_queue=8)
    for number in range(8):
        sim.add(make_request(f"a{number}", [1], owner="a"))
    with pytest.raises(QueueFullError, match="8 requests wait, max_queue allows 8"):
        sim.add(make_request("a8", [1], owner="a"))
    for number in range(4):
        sim.add(make_request(f"b{number}", [1], owner="b"))
    with pytest.raises(QueueFullError, match="12 requests wait, max_queue allows 8"):
        sim.add(make_request("b4", [1], owner="b"))
    sim.run()


def test_one_owner_is_served_in_order_of_arrival(fair: Run) -> None:
    fair.add("a", 24)
    fair.finish()
    assert fair.engine.stats().preemptions == 0
    order = sorted(fair.ends, key=lambda name: (fair.ends[name], int(name[1:])))
    assert order == [f"a{number}" for number in range(24)]


def test_decodes_that_take_all_tokens_of_a_step_leave_some_for_another_owner() -> None:
    sim = Simulation(layout=simulated_layout(400), policy=FairPolicy, max_num_seqs=16, max_num_batched_tokens=8)
    for number in range(8):
        sim.add(make_request(f"a{number}", [1], 60, owner="a", seed=number))
    while sim.scheduler.lifecycle.num_running < 8:
        sim.step()
    asked = make_request("b", [2], 4, owner="b")
    sim.add(asked)
    began = len(sim.plans)
    sim.run()
    sim.check(asked)
    (answered,) = (step for step, plan in enumerate(sim.plans) for new in plan.added if new.request_id == "b")
    assert answered - began <= 8, "it waits for a request of another owner to end"


def test_a_prompt_does_not_give_way_in_a_step_in_which_another_begins_with_its_blocks() -> None:
    """What the step computes of it is found by the other, admitted in the same step, and would never be there."""
    limits = {"max_num_seqs": 7, "max_num_batched_tokens": 24, "long_prefill_token_threshold": 8}
    layout = simulated_layout(16)
    sim = Simulation(layout=layout, policy=FairPolicy, max_in_flight=1, max_num_partial_prefills=4, **limits)
    prompt = [1 + place % 9 for place in range(56)]
    requests = [make_request(f"a{number}", [5, 6, number], 40, owner="a") for number in range(2)]
    requests.append(make_request("long", prompt, 4, owner="a"))
    for one in requests:
        sim.add(one)
    while len(sim.plans) < 4:
        sim.step()
    later = [make_request("shares", [*prompt[:40], 10, 11], owner="b"), make_request("short", [3] * 3, owner="c")]
    for one in later:
        sim.add(one)
    sim.run()
    for one in [*requests, *later]:
        sim.check(one)
