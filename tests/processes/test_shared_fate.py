"""Engines that share experts end together, and the one at fault is named, not one that waited for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from frame.core.processes.shared_fate import LAST_SECONDS, Death, SharedFate, Verdict
from frame.interfaces import Progress
from frame.ranks.standstill import NOTE_SECONDS, STILL_SECONDS, Standing, StandingNotes, engine_behind

KILLED = Death("the engine process was killed by SIGKILL", killed=True, told=False, began=True)
CRASHED = Death("the engine process ended with status 7", told=False, began=True)
HUNG = Death("the engine process hung: no step ended within 4 seconds", told=False, began=True, hung=True)
WAITED = Death("the engine process ended with status 1: the other workers did not come, or ended", began=True)
WORKER_GONE = Death("the engine process ended with status 1: worker 1 of 2 died", killed=True, began=True)
ITS_OWN = Death("the engine process ended with status 1: worker 1 of 2 hangs", began=True)


class Engine:
    """Stands in for the supervisor of one; when it is killed, it dies of that, if it has not died already."""

    def __init__(self, fate: SharedFate, rank: int, standing: Standing | None) -> None:
        self.fate, self.rank, self.standing = fate, rank, standing
        self.judged: list[Death] = []
        self.verdict: asyncio.Task[Verdict] | None = None

    def dies(self, death: Death) -> None:
        self.verdict = asyncio.create_task(self.fate.settle(self, death))

    async def judge(self, death: Death) -> Verdict:
        self.judged.append(death)
        return Verdict(death.cause, final=False)

    def kill(self) -> None:
        if self.verdict is None:
            self.dies(KILLED)

    async def begin_wave(self, number: int) -> None:
        raise NotImplementedError


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    fate = SharedFate()
    found = [Engine(fate, rank, Standing(5, 0, 0.0)) for rank in range(3)]
    for one in found:
        fate.add(one)
    yield found
    fate.close()


async def named(engines: list[Engine]) -> tuple[int, str]:
    """Whose death is told of, and how; exactly one engine counts as dead."""
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        while any(one.verdict is None for one in engines):
            await asyncio.sleep(0.01)
        verdicts = [await one.verdict for one in engines if one.verdict is not None]
    (guilty,) = [one.rank for one in engines if one.judged]
    (death,) = engines[guilty].judged
    for one, verdict in zip(engines, verdicts, strict=True):
        told = f"engine {guilty}, with which it shares experts, is gone: {death.cause}"
        assert verdict.cause == (death.cause if one.rank == guilty else told)
    return guilty, death.cause


@pytest.mark.parametrize("death", [KILLED, CRASHED, HUNG, WAITED, WORKER_GONE, ITS_OWN])
async def test_the_only_one_that_was_not_killed_for_it_is_named(engines: list[Engine], death: Death) -> None:
    engines[1].dies(death)
    assert await named(engines) == (1, death.cause)


@pytest.mark.some(1)
@pytest.mark.parametrize("late", [KILLED, CRASHED, HUNG, WORKER_GONE])
async def test_one_that_is_seen_to_die_after_another_says_that_it_waited_is_named(
    engines: list[Engine], late: Death
) -> None:
    engines[0].dies(WAITED)
    await asyncio.sleep(LAST_SECONDS / 4)
    engines[2].dies(late)
    assert await named(engines) == (2, late.cause)


@pytest.mark.parametrize("first", [HUNG, WAITED])
async def test_where_all_hang_the_one_that_has_come_less_far_is_named(engines: list[Engine], first: Death) -> None:
    for one in engines:
        one.standing = Standing(7, 3 - (one.rank == 1), STILL_SECONDS)
    engines[2].dies(first)
    why = (
        "the engine process hung: it is at step 7 and exchange 2 with the other engines in it, and they wait for it at "
        "step 7 and exchange 3"
    )
    assert await named(engines) == (1, why)


async def test_what_the_one_that_hangs_says_itself_is_kept(engines: list[Engine]) -> None:
    for one in engines:
        one.standing = Standing(7 - (one.rank == 1), 3, STILL_SECONDS)
    engines[2].dies(WAITED)
    await asyncio.sleep(LAST_SECONDS / 4)
    engines[1].dies(ITS_OWN)
    rank, cause = await named(engines)
    assert (rank, cause.startswith(f"{ITS_OWN.cause}: it is at step 6 and exchange 3 with")) == (1, True)


@pytest.mark.parametrize("death", [KILLED, CRASHED, WORKER_GONE])
async def test_one_that_died_is_named_whoever_lags(engines: list[Engine], death: Death) -> None:
    for one in engines:
        one.standing = Standing(7, 3 - (one.rank == 1), STILL_SECONDS)
    engines[2].dies(death)
    assert await named(engines) == (2, death.cause)


async def test_they_can_die_again(engines: list[Engine]) -> None:
    for rank in (0, 2):
        engines[rank].dies(WAITED)
        assert (await named(engines))[0] == rank
        for one in engines:
            one.verdict = None
            one.judged.clear()


def test_only_one_that_is_behind_alone_while_all_stand_still_is_known() -> None:
    still, moved = STILL_SECONDS, STILL_SECONDS / 2
    first, second = Standing(7, 2, still), Standing(7, 3, still)
    assert engine_behind({0: second, 1: first}) is not None
    assert engine_behind({0: second, 1: first, 2: second}) == engine_behind({0: second, 1: first})
    for others in ({}, {0: first}, {0: Standing(7, 3, moved)}, {0: None}, {0: second, 2: first}):
        assert engine_behind({1: first, **others}) is None
    assert engine_behind({0: second, 1: Standing(7, 2, moved)}) is None


class Notebook:
    def __init__(self) -> None:
        self.notes: list[Standing] = []

    def stand(self, step: int, exchanges: int, still_seconds: float) -> None:
        self.notes.append(Standing(step, exchanges, still_seconds))


@pytest.mark.matrix
async def test_notes_say_for_how_long_an_engine_has_been_where_it_is() -> None:
    notebook, at = Notebook(), [Progress(3, 9, 4)]
    notes = StandingNotes(notebook, lambda: at[0])
    try:
        async with asyncio.timeout(60):
            while len(notebook.notes) < 3:
                await asyncio.sleep(NOTE_SECONDS / 4)
            at[0] = Progress(3, 10, 4)
            before = len(notebook.notes)
            while len(notebook.notes) == before:
                await asyncio.sleep(NOTE_SECONDS / 4)
    finally:
        notes.close()
    assert {(one.step, one.exchanges) for one in notebook.notes} == {(3, 4)}
    times = [one.still_seconds for one in notebook.notes[:before]]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] >= NOTE_SECONDS
    assert notebook.notes[before].still_seconds == 0, "another collective of the engine alone is progress, too"
