"""Requests that break their steps: found in halves, ended alone, without a change to any other."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine
from frame.core.engine.recovery.suspects import Suspects
from frame.core.interfaces.client import BrokenEngineError
from frame.core.interfaces.step import StepPlan
from frame.core.processes.journal import Journal, JournalReader, NullJournal, journal_name
from frame.plugins.schedulers.fcfs import FirstComeFirstServedPolicy
from frame.testing import engines
from frame.testing.fake_executor import FakeExecutor, FakeWorkers
from frame.testing.fake_worker import FakeWorker
from frame.testing.setups import make_setup
from tests.engine.simulation import Simulation, make_layout, make_request


def run_with_poison(sim: Simulation, poison: set[str], after: int = 0) -> None:
    """Steps that hold a poisonous request break once that request has `after` tokens."""
    for _ in range(5000):
        while len(sim.in_flight) < sim.max_in_flight:
            plan = sim.launch()
            if plan is None:
                break
            names = {request.request_id for request in sim.scheduler.living(plan)}
            if any(len(sim.tokens(name)) >= after for name in names & poison):
                sim.broken.add(plan.step)
                sim.worker.strict = False
        if not sim.in_flight:
            return
        sim.answer()
    raise AssertionError("the simulation does not end")


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("poison", [{"3"}, {"0", "11"}, {"4", "5", "6"}])
def test_requests_at_fault_end_and_all_others_get_their_tokens(in_flight: int, after: int, poison: set[str]) -> None:
    sim = Simulation(layout=make_layout(200), max_in_flight=in_flight, max_num_batched_tokens=24)
    requests = {str(i): make_request(str(i), [i % 5] * (5 + i), max_tokens=9, seed=i) for i in range(12)}
    for request in requests.values():
        sim.add(request)
    run_with_poison(sim, poison, after)
    for name, request in requests.items():
        if name in poison:
            assert sim.reason(name) == "error"
        else:
            sim.check(request)
    assert not sim.scheduler.lifecycle.requests
    assert not sim.scheduler.quarantine.active
    sim.check_quiet()


def test_a_step_that_breaks_once_costs_nobody_a_token() -> None:
    sim = Simulation(layout=make_layout(200))
    requests = [make_request(str(i), [i] * 6, max_tokens=8) for i in range(6)]
    for request in requests:
        sim.add(request)
    sim.launch()
    sim.launch(breaks=True)
    sim.run()
    for request in requests:
        sim.check(request)


def test_suspects_of_an_earlier_engine_run_after_the_others_and_alone() -> None:
    sim = Simulation(layout=make_layout(200), max_in_flight=1)
    sim.scheduler.quarantine.suspect(Suspects([["a", "b"], ["c", "never came"]]))
    for name in "abcde":
        sim.add(make_request(name, [1, 2, 3], max_tokens=20))
    seen: list[set[str]] = []
    deadline = time.monotonic() + 100
    while sim.scheduler.lifecycle.requests and time.monotonic() < deadline:
        plan = sim.launch()
        if plan is not None:
            seen.append({request.request_id for request in sim.scheduler.living(plan)})
            sim.answer()
    groups = [group for group, last in zip(seen, [set(), *seen], strict=False) if group != last]
    assert groups[:3] == [{"d", "e"}, {"a", "b"}, {"c"}]
    assert groups[3] >= set("abc")


def test_suspects_are_tried_in_halves_until_one_is_alone() -> None:
    suspects = Suspects()
    assert suspects.blame(["a", "b", "c", "d", "e"]) is None
    assert suspects.groups == [["a", "b", "c"], ["d", "e"]]
    assert suspects.blame(["d", "e"]) is None  # so the first group has passed
    assert suspects.groups == [["d"], ["e"]]
    assert suspects.blame(["e"]) == "e"
    assert suspects.groups == []
    assert suspects.blame(["x"]) == "x"
    assert suspects.blame([]) is None


def test_the_journal_names_what_is_in_flight_after_the_writers_end() -> None:
    reader = JournalReader()
    assert (reader.in_flight(), reader.beats, reader.num_answered, reader.cleared) == ([], None, 0, False)
    child = os.fork()
    if child == 0:
        sim = Simulation(layout=make_layout(200), max_in_flight=3, max_num_seqs=8)
        journal = Journal(reader.descriptor)
        journal.open(sim.scheduler.lifecycle.batch.slots.num_slots)
        journal.beat(idle=False)
        long_name = "ö" * 300
        for name in ("a", "b", long_name):
            sim.add(make_request(name, [1, 2], max_tokens=1 if name == "a" else 9))
        for _ in range(60):
            plan = sim.launch()
            if plan is not None:
                journal.launch(plan)
            if len(sim.in_flight) == 3 or plan is None:
                if not sim.in_flight or len(sim.plans) == 4:
                    break
                sim.answer()
                journal.answer()
        os._exit(0)
    os.waitpid(child, 0)
    assert reader.in_flight() == ["b", journal_name("ö" * 300)]
    assert len(journal_name("ö" * 300)) < 128
    assert (reader.num_answered, reader.beats) == (1, 1)
    reader.close()


def test_a_journal_entry_costs_microseconds() -> None:
    sim = Simulation(layout=make_layout(2000), max_num_seqs=256)
    for number in range(256):
        sim.add(make_request(str(number), [1, 2], max_tokens=9))
    journal = Journal(JournalReader().descriptor)
    journal.open(256)
    sim.step()
    plan = sim.launch()
    assert plan is not None
    assert len(plan.slots) == 256
    times = []
    for _ in range(200):
        start = time.thread_time()
        journal.launch(plan)
        journal.answer()
        times.append(time.thread_time() - start)
    assert sorted(times)[100] < 1e-4  # some 2 µs where nothing else runs
    NullJournal().launch(plan)


def test_random_requests_at_fault_are_found_and_no_other_ends() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        sim = Simulation(
            layout=make_layout(rng.choice([40, 200])),
            max_in_flight=rng.randrange(1, 4),
            max_num_batched_tokens=rng.choice([8, 40]),
            max_num_seqs=rng.choice([2, 4, 8]),
        )
        requests = {
            str(i): make_request(str(i), [rng.randrange(5)] * rng.randrange(1, 12), max_tokens=rng.randrange(1, 9))
            for i in range(10)
        }
        poison = set(rng.sample(sorted(requests), rng.randrange(3)))
        for request in requests.values():
            sim.add(request)
        run_with_poison(sim, poison, rng.randrange(3))
        for name, request in requests.items():
            if name not in poison:
                sim.check(request)


class PoisonedWorker(FakeWorker):
    """Raises for steps with a request called "p…", and for all once it is broken."""

    broken = False

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        names = [self.slots[slot].request_id for slot in plan.slots.tolist()]
        if any(name.startswith("p") for name in names) or (self.broken and names):
            raise RuntimeError("the kernel failed")

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().call(method, arguments, timeout)


@pytest.fixture
def poisoned() -> Iterator[tuple[Engine, PoisonedWorker]]:
    config, layout = from_flat({"max_num_seqs": 16, "max_num_batched_tokens": 200}), make_layout(400)
    worker = PoisonedWorker(layout)
    executor = FakeExecutor(make_setup("executor", config=config, workers=FakeWorkers(lambda rank: worker)))
    policy = FirstComeFirstServedPolicy(make_setup("scheduler", config=config))
    engine = engines.fake_engine(config, executor, policy, layout)
    yield engine, worker
    engine.close()


def finish(engine: Engine) -> dict[str, str]:
    """Why each request ended."""
    ends: dict[str, str] = {}
    while engine.has_unfinished():
        ends |= {output.request_id: output.finish_reason for output in engine.step() if output.finish_reason}
    return ends


def test_several_requests_that_break_each_step_end_alone_and_the_engine_goes_on(
    poisoned: tuple[Engine, PoisonedWorker],
) -> None:
    engine, _ = poisoned
    names = ["a", "p1", "b", "p2", "p3", "c", "p4", "d"]
    for name in names:
        engine.add(engines.request(name, [1, 2, 3], 5))
    assert finish(engine) == {name: "error" if name.startswith("p") else "length" for name in names}


def test_a_device_that_fails_for_good_ends_the_engine_before_all_requests_have_ended(
    poisoned: tuple[Engine, PoisonedWorker],
) -> None:
    engine, worker = poisoned
    for number in range(16):
        engine.add(engines.request(f"r{number}", [1, 2, 3], 5))
    engine.step()
    worker.broken = True
    with pytest.raises(BrokenEngineError, match="unrelated requests fail one after the other: the kernel failed"):
        finish(engine)
    assert len(engine.scheduler.lifecycle.requests) == 15


def test_a_worker_that_fails_whoever_asks_ends_the_engine_before_all_requests_have_ended(
    poisoned: tuple[Engine, PoisonedWorker],
) -> None:
    engine, _ = poisoned
    for number in range(16):
        engine.add(engines.request(f"p{number}", [1, 2, 3], 5))
    with pytest.raises(BrokenEngineError, match="unrelated requests fail"):
        finish(engine)
    assert len(engine.scheduler.lifecycle.requests) >= 7
