"""Waves: engines launch equally many steps, and go on exactly as long as any of them has requests."""

from __future__ import annotations

import random

import numpy as np
import pytest

from frame.core.engine.waves import NoWaves, Waves
from frame.interfaces import StepResult

NOTHING = np.zeros(0, np.int32)


def result(busy: bool) -> StepResult:
    return StepResult(step=0, token_ids=NOTHING, num_tokens=NOTHING, peers_busy=busy)


class Rank:
    """An engine that launches what it may, and has `work` steps with rows to do."""

    def __init__(self, max_in_flight: int, ask) -> None:
        self.waves, self.work = Waves(max_in_flight, ask), 0
        self.launches: list[bool] = []  # whether each step has rows of this rank

    def launch(self) -> None:
        self.waves.look(self.work > 0)
        while self.waves.demands:
            self.launches.append(self.work > 0)
            self.work -= self.work > 0
            self.waves.launched()


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_all_engines_launch_equally_many_steps(max_in_flight: int, seed: int) -> None:
    """Whenever requests come, and in whatever order the engines get on: each waits for the others' launches alone."""
    draw, asked = random.Random(seed), []
    ranks = [Rank(max_in_flight, asked.append) for _ in range(3)]
    answered = [0, 0, 0]
    for turn in range(3000):
        if turn < 2000 and draw.random() < 0.02:
            draw.choice(ranks).work += draw.randint(1, 6)
        if asked and draw.random() < 0.5:
            number = asked.pop()
            for rank in ranks:
                rank.waves.begin(number)
        place = draw.randrange(3)
        rank, step = ranks[place], answered[place]
        rank.launch()
        if all(len(one.launches) > step for one in ranks):
            rank.waves.answered(result(any(one.launches[step] for one in ranks)))
            answered[place] += 1
    assert not any(rank.waves.running or rank.work for rank in ranks)
    assert len({len(rank.launches) for rank in ranks}) == 1
    assert answered == [len(rank.launches) for rank in ranks]
    assert sum(map(any, zip(*(rank.launches for rank in ranks), strict=True)))


def test_a_wave_ends_with_the_last_request() -> None:
    asked: list[int] = []
    waves = Waves(2, asked.append)
    waves.look(has_work=False)
    assert (waves.running, waves.allows, asked) == (False, False, [])
    waves.look(has_work=True)
    waves.look(has_work=True)
    assert asked == [1], "it asks once"
    assert not waves.allows, "others do not step yet"
    waves.begin(1)
    waves.begin(1)
    assert waves.running
    for busy in (None, None, True, False, False):
        if busy is not None:
            waves.answered(result(busy))
        waves.look(has_work=False)
        if waves.demands:
            waves.launched()
    assert not waves.running
    waves.look(has_work=True)
    assert asked == [1, 2]


def test_engines_that_step_alone_know_no_waves() -> None:
    alone = NoWaves()
    assert alone.allows
    assert (alone.demands, alone.running) == (False, False)
    with pytest.raises(ValueError, match="wave 3 cannot begin: this engine steps alone"):
        alone.begin(3)
