"""Who waits looks on while there is much to do and nobody else wants the processor. Time is a number here."""

from __future__ import annotations

import pytest

from frame.links import lookout
from frame.links.lookout import Lookout

#: Seconds that pass with each look at the clock.
TICK = 1e-6


class Clock:
    """In the place of `time` and `os`; `taken` is how long another thread has the processor when it is given away."""

    def __init__(self) -> None:
        self.now, self.taken, self.num_given, self.slept = 100.0, 0.0, 0, 0.0

    def monotonic(self) -> float:
        self.now += TICK
        return self.now

    def sched_yield(self) -> None:
        self.num_given += 1
        self.now += self.taken

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(lookout, "time", made)
    monkeypatch.setattr(lookout, "os", made)
    return made


def looked(waiting: Lookout, clock: Clock, most_seconds: float = float("inf")) -> float:
    """Seconds that it looks for what does not come."""
    begin = clock.now
    assert not waiting.look(lambda: False, most_seconds)
    return clock.now - begin


def test_it_looks_for_long_only_after_what_came_soon(clock: Clock) -> None:
    waiting = Lookout(20e-3)
    assert looked(waiting, clock) == pytest.approx(50e-6, abs=10 * TICK)
    waiting.waited(19e-3)
    assert looked(waiting, clock) == pytest.approx(20e-3, abs=10 * TICK)
    assert looked(waiting, clock, 5e-3) == pytest.approx(5e-3, abs=10 * TICK)
    waiting.waited(21e-3)
    assert looked(waiting, clock) == pytest.approx(50e-6, abs=10 * TICK)


def test_it_finds_what_comes_meanwhile(clock: Clock) -> None:
    waiting = Lookout(20e-3)
    waiting.waited(0.0)
    assert waiting.look(lambda: clock.num_given == 1000, float("inf"))
    assert clock.num_given == 1000


def test_it_leaves_a_processor_that_others_want_and_tries_again_after_a_second(clock: Clock) -> None:
    waiting = Lookout(20e-3)
    waiting.waited(0.0)
    clock.taken = 3e-3
    assert looked(waiting, clock) == pytest.approx(3e-3, abs=10 * TICK)
    assert clock.num_given == 1
    clock.taken = 0.0
    assert looked(waiting, clock) == pytest.approx(50e-6, abs=10 * TICK)
    clock.now += 1.0
    assert looked(waiting, clock) == pytest.approx(20e-3, abs=10 * TICK)


def test_a_pause_gives_way_or_sleeps_where_others_want_the_processor(clock: Clock) -> None:
    waiting = Lookout(20e-3)
    waiting.pause()
    assert (clock.num_given, clock.slept) == (1, 0.0)
    clock.taken = 3e-3
    waiting.pause()
    waiting.pause()
    assert (clock.num_given, clock.slept) == (2, 50e-6)
    clock.now += 1.0
    waiting.pause()
    assert (clock.num_given, clock.slept) == (3, 50e-6)


def test_what_came_while_others_had_the_processor_is_found(clock: Clock) -> None:
    waiting = Lookout(20e-3)
    clock.taken = 3e-3
    assert waiting.look(lambda: clock.num_given == 1, float("inf"))


def test_without_seconds_it_does_not_look(clock: Clock) -> None:
    waiting = Lookout(0.0)
    for _ in range(2):
        assert looked(waiting, clock) == pytest.approx(0.0, abs=5 * TICK)
        waiting.waited(0.0)
    waiting.pause()
    assert (clock.num_given, clock.slept) == (0, 50e-6)
