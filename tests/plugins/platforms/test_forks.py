"""Forked work is bounded in number and in time, and every child is reaped."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from frame.plugins.platforms.cuda.compile.forks import ForkedGroup, Forks

LONG = 600.0


def children() -> set[int]:
    """Living and unreaped children of this process."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def record(folder: Path, name: str, seconds: float) -> None:
    began = time.monotonic()
    time.sleep(seconds)
    (folder / name).write_text(f"{began} {time.monotonic()}")


def test_no_more_than_the_limit_run_at_a_time(tmp_path: Path) -> None:
    before, forks = children(), Forks(seconds=LONG, all_seconds=LONG, limit=2)
    for index in range(6):
        forks.start(lambda index=index: record(tmp_path, str(index), 0.05))
        assert len(children() - before) <= 2
    forks.wait()
    spans = [tuple(map(float, file.read_text().split())) for file in tmp_path.iterdir()]
    assert len(spans) == 6
    assert max(sum(began <= moment < ended for began, ended in spans) for moment, _ in spans) <= 2
    assert children() == before
    assert forks.num_failed == 0


def test_one_that_hangs_is_killed_and_the_others_finish(tmp_path: Path) -> None:
    before, forks = children(), Forks(seconds=2.0, all_seconds=LONG, limit=2)
    forks.start(lambda: time.sleep(LONG))
    for name in "abc":
        forks.start(lambda name=name: record(tmp_path, name, 0))
    forks.wait()
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b", "c"}
    assert forks.num_failed == 1
    assert children() == before


def test_all_of_them_have_an_end() -> None:
    before, forks = children(), Forks(seconds=LONG, all_seconds=0.2, limit=1)
    for _ in range(20):
        forks.start(lambda: time.sleep(LONG))
    forks.wait()
    assert forks.num_failed == 20
    assert children() == before


def test_stop_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    before, forks = children(), Forks(seconds=LONG, all_seconds=LONG, limit=1)
    forks.start(lambda: time.sleep(LONG))
    forks.start(lambda: record(tmp_path, "never", 0))
    forks.stop()
    forks.wait()
    assert not list(tmp_path.iterdir())
    assert children() == before


@pytest.mark.parametrize("fault", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_one_that_raises_costs_nothing_but_itself(
    fault: BaseException, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise fault

    mine, forks = os.getpid(), Forks(seconds=LONG, all_seconds=LONG)
    forks.start(fail)
    forks.start(lambda: record(tmp_path, "other", 0))
    forks.wait()
    assert os.getpid() == mine
    assert [file.name for file in tmp_path.iterdir()] == ["other"]
    assert forks.num_failed == 1
    capfd.readouterr()


def test_a_group_tells_how_it_ended_and_has_an_end_itself() -> None:
    before = children()
    assert ForkedGroup(lambda: None, LONG).wait()
    assert not ForkedGroup(lambda: 1 // 0, LONG).wait()
    assert not ForkedGroup(lambda: time.sleep(LONG), 0.2).wait()
    stopped = ForkedGroup(lambda: time.sleep(LONG), LONG)
    assert not stopped.has_ended()
    stopped.stop()
    assert stopped.has_ended()
    assert not stopped.wait()
    asked, end = ForkedGroup(lambda: None, LONG), time.monotonic() + 60
    while not asked.has_ended() and time.monotonic() < end:
        time.sleep(0.01)
    assert asked.has_ended()
    assert asked.wait(), "asked again, how it ended"
    assert children() == before
