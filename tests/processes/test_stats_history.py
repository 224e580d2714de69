"""The samples that a late view of the engine is drawn from."""

from __future__ import annotations

import pytest

from frame.core.interfaces.engine import EngineStats
from frame.core.processes import stats_history
from frame.core.processes.stats_history import MAX_SAMPLES, StatsHistory


def test_a_second_gives_one_sample_and_the_end_of_work_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(stats_history.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stats_history.time, "time", lambda: now[0])
    steps = [0]

    def read() -> EngineStats:
        steps[0] += 1
        return EngineStats(steps=steps[0])

    history = StatsHistory(read)
    for _ in range(50):  # half a second of steps
        history.note(idle=False)
        now[0] += 0.01
    assert [sample["steps"] for sample in history.samples()] == [1]
    history.note(idle=True)
    assert [sample["steps"] for sample in history.samples()] == [2]
    for _ in range(3 * MAX_SAMPLES):
        now[0] += 1.0
        history.note(idle=False)
    assert len(history.samples()) == MAX_SAMPLES
    now[0] += MAX_SAMPLES + 1
    assert history.samples() == []
