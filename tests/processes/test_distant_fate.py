"""What a server and other machines tell each other of engines that share experts, without connections between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.parallel.rendezvous import placements_of
from frame.core.plugin_host.setups import mesh_of
from frame.core.processes.shared_fate import Death, OwnFate, SharedFate, Verdict
from frame.elastic.distant_fate import DistantFate, DistantMembers, fate_of
from frame.links.fate_messages import Died, Judged, Kill, Settled, SharedWave
from frame.ranks.standstill import STILL_SECONDS, Standing

KILLED = Death("the engine process was killed by SIGKILL", killed=True, told=False, began=True)
CRASHED = Death("the engine process ended with status 7", told=False, began=True)
WAITED = Death("the engine process ended with status 1: the other workers did not come, or ended", began=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


class Engine:
    """Stands in for the supervisor of one: dies when it is killed, and is started as often as its verdict allows."""

    def __init__(self, fate: OwnFate, rank: int, most_deaths: int = 9) -> None:
        self.fate, self.rank, self.standing = fate, rank, Standing(5, 0, 0.0)
        self.most_deaths, self.judged, self.waves = most_deaths, list[Death](), list[int]()
        self.verdict: asyncio.Task[Verdict] | None = None
        fate.add(self)

    def dies(self, death: Death) -> None:
        self.verdict = asyncio.create_task(self.fate.settle(self, death))

    async def judge(self, death: Death) -> Verdict:
        self.judged.append(death)
        return Verdict(death.cause, len(self.judged) > self.most_deaths)

    def kill(self) -> None:
        if self.verdict is None:
            self.dies(KILLED)

    async def begin_wave(self, number: int) -> None:
        self.waves.append(number)


class Machines:
    """A server with engine 0, and a machine with engines 1 and 2."""

    def __init__(self, most_deaths: int = 9) -> None:
        self.shared, self.distant = (
            SharedFate("tcp://127.0.0.1:1#127.0.0.1"),
            DistantFate("tcp://127.0.0.1:1#127.0.0.2"),
        )
        self.there = True
        self.said: list[Any] = []
        self.members = DistantMembers(self.shared, [1, 2], self._order)
        self.distant.send = self._tell
        fates = (self.shared, self.distant, self.distant)
        self.engines = [Engine(fate, rank, most_deaths) for rank, fate in enumerate(fates)]

    async def _order(self, rank: int, order: Any) -> None:
        self.said.append(order)
        await asyncio.sleep(0)
        if self.there:
            await self.distant.obey(order)

    async def _tell(self, news: Any) -> None:
        self.said.append(news)
        await asyncio.sleep(0)
        if self.there:
            await self.members.news(news)

    async def verdicts(self) -> list[Verdict]:
        """Of all three; they may die again then."""
        async with asyncio.timeout(30):
            while any(one.verdict is None for one in self.engines):
                await asyncio.sleep(0.01)
            found = [await one.verdict for one in self.engines if one.verdict is not None]
        for one in self.engines:
            one.verdict = None
        return found


@pytest.mark.some(3)
@pytest.mark.parametrize("death", [KILLED, CRASHED, WAITED])
@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_all_end_with_one_and_it_alone_is_judged_where_it_was(rank: int, death: Death) -> None:
    machines = Machines()
    for number in (1, 2):
        machines.engines[rank].dies(death)
        told = f"engine {rank}, with which it shares experts, is gone: {death.cause}"
        assert [one.cause for one in await machines.verdicts()] == [
            death.cause if other == rank else told for other in range(3)
        ]
        assert [len(one.judged) for one in machines.engines] == [number * (other == rank) for other in range(3)]
        assert not machines.distant.falling
        assert not machines.shared.falling
    kinds = {type(one) for one in machines.said}
    assert kinds >= {Died, Settled}
    assert (Judged in kinds) is (rank > 0)
    assert Kill(2 if rank < 2 else 1) in machines.said


async def test_one_that_stands_behind_on_another_machine_is_named() -> None:
    machines = Machines()
    for one in machines.engines:
        one.standing = Standing(7, 3 - (one.rank == 2), STILL_SECONDS)
    machines.engines[0].dies(WAITED)
    await machines.verdicts()
    (death,) = machines.engines[2].judged
    assert death.cause.startswith("the engine process hung: it is at step 7 and exchange 2 with the other engines")


@pytest.mark.parametrize("rank", [0, 1])
async def test_too_many_deaths_end_all_for_good(rank: int) -> None:
    machines = Machines(most_deaths=1)
    for final in (False, True):
        machines.engines[rank].dies(CRASHED)
        assert {one.final for one in await machines.verdicts()} == {final}


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_wave_reaches_the_engines_of_all_machines(rank: int) -> None:
    machines = Machines()
    await machines.engines[rank].fate.begin_wave(4)
    assert [set(one.waves) for one in machines.engines] == [{4}] * 3
    assert SharedWave(1, 4) in machines.said


@pytest.mark.parametrize("while_dying", [False, True])
async def test_a_machine_that_is_gone_ends_the_server_s_engines_for_good(while_dying: bool) -> None:
    machines = Machines()
    here, there, _ = machines.engines
    if while_dying:
        here.kill = lambda: None  # type: ignore[method-assign]
        there.dies(CRASHED)
        await until(lambda: any(isinstance(one, Died) for one in machines.said))
        await asyncio.sleep(0.05)
    machines.there = False
    machines.members.lost([1, 2], "the machine at 127.0.0.2 with engines 1, 2 is gone")
    if while_dying:
        here.dies(KILLED)
    await until(lambda: here.verdict is not None)
    verdict = await asyncio.wait_for(here.verdict, 30)
    said = "engine 1, with which it shares experts, is gone: the machine at 127.0.0.2 with engines 1, 2 is gone"
    assert verdict == Verdict(said, final=True)
    assert not any(one.judged for one in machines.engines)


async def test_an_engine_that_may_start_again_does_so_before_its_neighbours_are_told() -> None:
    """The server says it of each engine by itself, and what it said of the second may come later."""
    machines = Machines()
    fate, (_, one, two) = machines.distant, machines.engines
    one.dies(CRASHED)
    two.dies(KILLED)
    await asyncio.sleep(0)
    assert fate.falling
    await fate.obey(Settled(1, Verdict("it crashed", final=False)))
    assert not fate.falling
    await fate.obey(Settled(2, Verdict("it was ended with engine 1", final=False)))
    assert not fate.falling


async def test_a_verdict_on_an_engine_that_was_stopped_meanwhile_is_no_error() -> None:
    machines = Machines()
    machines.there = False
    machines.engines[1].dies(CRASHED)
    await until(lambda: machines.engines[1].verdict is not None)
    machines.engines[1].verdict.cancel()
    await asyncio.sleep(0.01)
    await machines.distant.obey(Settled(1, Verdict("it crashed", final=False)))


async def test_a_machine_that_goes_with_the_news_of_an_engine_s_end_ends_it_once() -> None:
    settled: list[Death] = []

    class Fate(SharedFate):
        async def settle(self, member: Any, death: Death) -> Verdict:
            settled.append(death)
            await asyncio.sleep(0)
            return Verdict(death.cause, final=True)

    async def send(rank: int, order: Any) -> None:
        pass

    fate = Fate("tcp://127.0.0.1:1#127.0.0.1")
    members = DistantMembers(fate, [1], send)
    await members.news(Died(1, CRASHED, None))
    members.lost([1], "the machine at 127.0.0.2 is gone")
    await until(lambda: bool(settled))
    await asyncio.sleep(0.05)
    assert [death.cause for death in settled] == ["the machine at 127.0.0.2 is gone"]


def config(**changes: Any) -> FrameConfig:
    values = {
        "data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_address": "10.0.0.1",
        "data_parallel_secret_file": "secret", "enable_expert_parallel": True, **changes,
    }  # fmt: skip
    return FrameConfig.from_flat(**values)


HEADLESS = {"headless": True, "data_parallel_start_rank": 2}


@pytest.mark.parametrize(
    ("changes", "kind", "rendezvous"),
    [
        ({}, SharedFate, "tcp://10.0.0.1:29551#10.0.0.1"),
        ({"data_parallel_address": "::1"}, SharedFate, "tcp://[::1]:29551#::1"),
        ({**HEADLESS, "data_parallel_own_address": "10.0.0.2"}, DistantFate, "tcp://10.0.0.1:29551#10.0.0.2"),
        ({"enable_expert_parallel": False}, OwnFate, ""),
    ],
)
def test_workers_meet_at_the_server_s_next_port(changes: dict[str, Any], kind: type, rendezvous: str) -> None:
    fate = fate_of(config(**changes))
    assert type(fate) is kind
    assert fate.rendezvous == rendezvous
    fate.close()


def test_a_worker_is_reached_at_its_machine() -> None:
    tree = config(**HEADLESS, tensor_parallel_size=2)
    made = placements_of(mesh_of(tree), "tcp://10.0.0.1:29551#10.0.0.2", tree.data_parallel.engine(3))
    assert [(one.rank, one.local_rank, one.rendezvous, one.address) for one in made] == [
        (rank, rank - 4, "tcp://10.0.0.1:29551", "10.0.0.2") for rank in (6, 7)
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"data_parallel_start_rank": 1},
            "data_parallel_start_rank 1: a server whose engines share experts starts",
        ),
        ({"data_parallel_rpc_port": 65535}, "meet at the port after data_parallel_rpc_port 65535"),
        ({"nnodes": 2, "master_addr": "10.0.0.1", "tensor_parallel_size": 2}, "each engine of data_parallel_address"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**changes)
