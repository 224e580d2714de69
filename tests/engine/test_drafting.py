"""How many drafts a step gets, and what the scheduler makes of those that do not hold."""

from __future__ import annotations

import pytest

from tests.engine.simulation import Simulation, make_layout, make_request

SPECULATION = {"speculator": "luck", "num_speculative_tokens": 4}


def simulate(windows=(None,), num_blocks=60, **settings):
    return Simulation(layout=make_layout(num_blocks, 2, windows), **SPECULATION, **settings)


@pytest.mark.parametrize("seed", range(12))
def test_a_window_keeps_the_blocks_that_are_read_again_after_rejected_drafts(seed):
    sim = simulate((3, None), max_in_flight=3, seed=seed)
    requests = [make_request(f"r{i}", [1, 2, 3 + i], 40, seed=seed + i) for i in range(2)]
    for request in requests:
        sim.add(request)
    sim.run()
    for request in requests:
        sim.check(request)
    assert any(plan.num_drafts.any() for plan in sim.plans)


def test_drafts_take_only_the_tokens_that_prompts_leave():
    sim = simulate(max_in_flight=1, max_num_batched_tokens=8)
    sim.add(make_request("a", [1, 2], 40))
    for _ in range(6):
        sim.step()
    sim.add(make_request("b", [3] * 21, 2))
    sim.run()
    shared = [plan for plan in sim.plans if len(plan.slots) == 2 and plan.num_scheduled.max() > 1]
    assert [plan.num_drafts.tolist() for plan in shared[:3]] == [[0, 0]] * 3
    assert any(plan.num_drafts.any() for plan in sim.plans)


def test_drafts_preempt_no_request():
    sim = simulate(num_blocks=21, max_in_flight=1)
    requests = [make_request(f"r{i}", [1, 2 + i], 16, seed=i) for i in range(2)]
    for request in requests:
        sim.add(request)
    sim.run()
    for request in requests:
        sim.check(request)
    assert sim.scheduler.stats().preemptions == 0
    assert sim.scheduler.stats().num_accepted_tokens > 0


def test_no_drafts_above_the_batch_limit():
    sim = simulate(disable_by_batch_size=2)
    for index in range(3):
        sim.add(make_request(f"r{index}", [1, 2 + index], 6 + 10 * index))
    sim.run()
    for plan in sim.plans:
        assert len(plan.slots) <= 2 or not plan.num_drafts.any()
    assert any(plan.num_drafts.any() for plan in sim.plans)


def test_without_a_speculator_no_step_has_drafts():
    sim = Simulation(layout=make_layout(20))
    sim.add(make_request("a", [1, 2], 8))
    sim.run()
    assert not any(plan.num_drafts.any() for plan in sim.plans)
    assert sim.scheduler.stats().num_accepted_per_place == []
