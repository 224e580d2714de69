"""Host time of a decode step, and what grows with the batch. Prints figures with `-s -m slow`."""

from __future__ import annotations

import time

import numpy as np
import pytest

from frame.core.interfaces.engine import EngineRequest
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import StepPlan, StepResult
from tests.engine.simulation import Simulation, make_layout


def answer(plan: StepPlan) -> StepResult:
    tokens = np.full((len(plan.slots), 1), 5, np.int32)
    return StepResult(step=plan.step, token_ids=tokens, num_tokens=plan.samples.astype(np.int32))


def measure(batch: int, steps: int = 300) -> tuple[float, float]:
    """Mean processor seconds of schedule() and of update() per decode step, with one step in flight besides."""
    layout = make_layout(batch * 80 + 16, 16)
    sim = Simulation(layout=layout, max_model_len=4096, max_num_seqs=batch, max_num_batched_tokens=8192)
    scheduler, rng = sim.scheduler, np.random.default_rng(0)
    for number in range(batch):
        prompt = rng.integers(0, 30000, 512 + number % 16).astype(np.int32)
        params = SamplingParams(max_tokens=700)
        scheduler.add(
            EngineRequest(
                request_id=str(number), prompt_ids=prompt, params=params, max_tokens=700, seed=1, eos_token_ids=[2]
            )
        )
    plan = scheduler.schedule()
    while plan.num_tokens != batch or len(plan.slots) != batch:
        scheduler.update(plan, answer(plan))
        plan = scheduler.schedule()
    planning = updating = 0.0
    for _ in range(steps):
        start = time.thread_time()
        following = scheduler.schedule()
        planning += time.thread_time() - start
        result = answer(plan)
        start = time.thread_time()
        scheduler.update(plan, result)
        updating += time.thread_time() - start
        plan = following
    return planning / steps, updating / steps


@pytest.mark.slow
def test_a_decode_step_of_256_requests_costs_the_host_less_than_a_millisecond():
    for batch in (1, 64, 256):
        planning, updating = min(measure(batch) for _ in range(3))
        print(f"batch {batch}: schedule {planning * 1e6:.0f} µs, update {updating * 1e6:.0f} µs")
    assert planning + updating < 1e-3
