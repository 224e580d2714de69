"""What the clock of a run's steps says of them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_steps() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import run_steps
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return run_steps


def test_kinds_follow_rows_and_tokens_and_name_what_long_steps_take_beyond_the_median(run_steps: ModuleType) -> None:
    def step(seconds: float, rows: int, tokens: int) -> object:
        return run_steps.Step(0.0, seconds, rows, tokens, False)

    steps = [step(0.5, 3, 700), *(step(seconds, 60, 60) for seconds in (0.010, 0.010, 0.012, 0.030))]
    decodes, prompts = run_steps.kinds(steps)
    assert decodes == {
        "kind": "decodes up to     64 rows", "steps": 4, "seconds": 0.062, "median ms": 11.0,
        "long": 1, "beyond s": 0.019,
    }  # fmt: skip
    assert (prompts["kind"], prompts["steps"]) == ("prompts up to  1,024 tokens", 1)
    [(place, found, beyond)] = run_steps.longest(steps, 1)
    assert (place, found.seconds) == (4, 0.030)
    assert beyond == pytest.approx(0.019)


def test_a_step_takes_the_time_since_the_answer_before_or_its_launch(
    run_steps: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1.0, 2.0, 4.0, 5.0, 9.0, 9.5])
    plans = iter(SimpleNamespace(step=number, slots=[0], num_tokens=1, capture=False) for number in range(3))
    scheduler = SimpleNamespace(schedule=lambda: next(plans), update=lambda plan, result: [result])
    watch = run_steps.Watch(scheduler)
    gc.callbacks.remove(watch._collected)
    monkeypatch.setattr(run_steps.time, "perf_counter", lambda: next(clock))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.update(first, "a") == ["a"]
    assert scheduler.update(second, "b") == ["b"]
    scheduler.update(scheduler.schedule(), "c")
    assert [step.seconds for step in watch.steps] == [3.0, 1.0, 0.5]
