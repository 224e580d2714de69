"""Several engines behind one client: requests are divided, and one that dies takes nothing from the others."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from frame.core.config.tree import FrameConfig
from frame.core.processes.messages import EngineDown, EngineUp
from frame.interfaces import EngineDeadError, EngineStats
from frame.ranks.client import DataParallelClient, start_engine
from frame.ranks.joined import joined_answers, joined_history, joined_stats
from tests.processes.test_client import COMMAND, Collector, request


def config(size: int = 2, restarts: int = 3, **fake: Any) -> FrameConfig:
    server = {"max_engine_restarts": restarts, "standby_engine": False}
    parts = {"server": server, "plugin": {"fake": fake}, "data_parallel": {"data_parallel_size": size}}
    return FrameConfig.model_validate(parts)


@pytest.fixture
async def client() -> AsyncIterator[DataParallelClient]:
    client = await start_engine(config(delay=0.002), command=COMMAND)
    assert isinstance(client, DataParallelClient)
    yield client
    await client.close()


def pids(client: DataParallelClient) -> list[int]:
    owner = client.on_close.__self__  # type: ignore[union-attr]
    return [one._engine.process.pid for one in owner.engines.supervisors.values()]


async def until(condition: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_requests_are_divided_and_answered(client: DataParallelClient) -> None:
    seen = Collector(client)
    names = [f"r{index}" for index in range(20)]
    await asyncio.gather(*(client.add(request(name, tokens=30)) for name in names))
    places = [client._running[name].place for name in names]
    assert [places.count(place) for place in (0, 1)] == [10, 10]
    stats = await client.stats()
    assert [one.rank for one in stats.ranks] == [0, 1]
    assert stats.running == sum(one.running for one in stats.ranks) > 0
    await until(lambda: len(seen.ends) == 20)
    assert all(seen.ids[name] == [1, 2, 3] * 10 for name in names)
    assert not client._running
    assert client._choice._own.tolist() == [0, 0]


async def test_the_pieces_of_a_session_go_to_one_engine(client: DataParallelClient) -> None:
    seen = Collector(client)
    places, follows = [], ""
    for name in ("s/1", "s/2", "s/3"):
        await client.add(msgspec.structs.replace(request(name, tokens=3), follows=follows))
        place = client._running[name].place
        busy = f"busy-{name}"  # which makes the other engine the better one
        if not places:
            client._choice.begin(place, 1e6)
        places.append(place)
        await until(lambda name=name: name in seen.ends)
        await client.add(request(busy, tokens=3))
        assert client._running[busy].place != place
        follows = name
    assert len(set(places)) == 1
    assert set(client._homes._engines) == {"s/3"}


async def test_a_session_with_the_name_of_an_earlier_one_stays_where_it_is(client: DataParallelClient) -> None:
    seen = Collector(client)
    client._homes.note("s/2", client._engines[0])  # of the earlier one, which ended with it
    client._choice.begin(0, 1e6)
    for name, follows in (("s/1", ""), ("s/2", "s/1")):
        await client.add(msgspec.structs.replace(request(name, tokens=3), follows=follows))
        assert client._running[name].place == 1
        await until(lambda name=name: name in seen.ends)


async def test_calls_reach_every_engine(client: DataParallelClient) -> None:
    assert await client.call("reset_prefix_cache") is True
    assert await client.call("worker", {"method": "name"}) == ["name", "name"]
    assert await client.call("echo", {"a": 1}) == {"a": 1}
    with pytest.raises(RuntimeError, match="engine 0: no method 'nothing'"):
        await client.call("nothing")


async def test_abort_reaches_the_engine_of_the_request(client: DataParallelClient) -> None:
    seen = Collector(client)
    for name in ("a", "b"):
        await client.add(request(name, tokens=400))
    await client.abort(["a", "unknown", "b"])
    await until(lambda: len(seen.ends) == 2)
    assert {end.finish_reason for end in seen.ends.values()} == {"abort"}


async def test_an_engine_that_dies_takes_only_its_requests_and_gets_them_again(client: DataParallelClient) -> None:
    seen = Collector(client)
    names = [f"r{index}" for index in range(8)]
    for name in names:
        await client.add(request(name, tokens=300))
    theirs = [name for name in names if client._running[name].place == 1]
    before = pids(client)
    os.kill(before[1], signal.SIGKILL)
    await until(lambda: len(seen.ends) >= len(theirs))
    lost = [name for name, end in seen.ends.items() if end.fault == "lost" and end.finish_reason == "error"]
    assert sorted(lost) == sorted(theirs)
    assert client.error is None, "the other engine serves"
    await client.add(request("new"))
    assert client._running["new"].place == 0
    with pytest.raises(EngineDeadError, match="engine 1: the engine process"):
        await client.call("reset_prefix_cache")
    stats = await client.stats()
    assert stats.ranks[0].problem is None
    # its connection may end before its supervisor says that another one comes
    assert re.search("being started again|is gone", str(stats.ranks[1].problem))
    for name in theirs:
        del seen.ends[name]
        await client.add(request(name, tokens=5))
        assert client._running[name].place == 1
    await until(lambda: len(seen.ends) == 9)
    assert all(end.finish_reason == "length" for end in seen.ends.values())
    after = pids(client)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert await client.call("reset_prefix_cache") is True


async def test_a_request_that_is_aborted_while_it_waits_is_forgotten(client: DataParallelClient) -> None:
    for pid in pids(client):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: client.error is not None)
    waiting = asyncio.create_task(client.add(request("a")))
    await until(lambda: "a" in client._running)
    await client.abort(["a"])
    await waiting
    assert not client._running
    assert client._choice._own.tolist() == [0, 0]
    await until(lambda: client.error is None)


async def test_an_engine_that_is_gone_for_good_leaves_its_requests_to_the_others() -> None:
    client = await start_engine(config(restarts=0, delay=0.002), command=COMMAND)
    assert isinstance(client, DataParallelClient)
    seen = Collector(client)
    for name in ("a", "b"):
        await client.add(request(name, tokens=300))
    (name,) = [name for name in ("a", "b") if client._running[name].place == 0]
    os.kill(pids(client)[0], signal.SIGKILL)
    await until(lambda: name in seen.ends)
    assert client.error is None
    assert client.end is None
    del seen.ends[name]
    await client.add(request(name))
    await until(lambda: len(seen.ends) == 2)
    assert {end.finish_reason for end in seen.ends.values()} == {"length"}
    os.kill(pids(client)[1], signal.SIGKILL)
    await until(lambda: client.end is not None)
    assert "engine 0: the engine process was killed" in str(client.error)
    assert "engine 1: the engine process was killed" in str(client.error)
    with pytest.raises(EngineDeadError):
        await client.add(request("c"))
    await client.close()


async def test_a_start_that_fails_names_the_engine_and_leaves_none() -> None:
    with pytest.raises(EngineDeadError, match=r"engine [01]: no such device"):
        await start_engine(config(broken="no such device"), command=COMMAND)


def test_statistics_are_joined() -> None:
    ranks = [
        EngineStats(running=1, kv_usage=0.5, num_blocks=100, step_seconds=0.1, finished={"stop": 2}, rank=0),
        EngineStats(running=2, kv_usage=0.1, num_blocks=300, step_seconds=0.3, finished={"length": 1}, rank=1),
    ]
    joined = joined_stats(ranks)
    assert (joined.running, joined.num_blocks, joined.step_seconds) == (3, 400, 0.3)
    assert joined.kv_usage == pytest.approx(0.2)
    assert joined.finished == {"stop": 2, "length": 1}
    assert joined.ranks == ranks


def test_gauges_of_connectors_that_are_shares_are_not_added_up() -> None:
    ranks = [
        EngineStats(connector_gauges={"mine_hit_ratio": 0.9, "mine_used_bytes": 5.0}),
        EngineStats(connector_gauges={"mine_hit_ratio": 0.7, "mine_used_bytes": 6.0}),
        EngineStats(connector_gauges={}),
    ]
    joined = joined_stats(ranks)
    assert joined.connector_gauges == pytest.approx({"mine_hit_ratio": 0.8, "mine_used_bytes": 11.0})


def test_histories_are_joined_by_the_second() -> None:
    def sample(time: float, running: int) -> dict[str, Any]:
        return {"time": time, **msgspec.structs.asdict(EngineStats(running=running))}

    joined = joined_history([[sample(1.0, 1), sample(2.0, 2), sample(3.0, 3)], [sample(1.1, 10), sample(3.1, 30)]])
    assert [(one["time"], one["running"]) for one in joined] == [(1.1, 11), (2.0, 12), (3.1, 33)]


def test_answers_are_joined() -> None:
    assert joined_answers([True, False]) is False
    assert joined_answers([2, 3]) == 5
    assert joined_answers([["a"], ["b"]]) == ["a", "b"]
    assert joined_answers([None, None]) is None


async def test_requests_of_an_engine_whose_machine_is_gone_go_to_another_until_it_is_back(
    client: DataParallelClient,
) -> None:
    seen = Collector(client)
    for name in ("a", "b", "c", "d"):
        await client.add(request(name, tokens=300))
    theirs = [name for name in ("a", "b", "c", "d") if client._running[name].place == 1]
    info, supervisor = client._engines[1].info, client.on_close.__self__.engines.supervisors[1]  # type: ignore[union-attr]
    address = supervisor._engine.address
    await client._engines[1]._stop_reading()  # as if nothing came from there any more
    client._engines[1]._on_disconnect("the connection broke", "lost")
    await until(lambda: all(name in seen.ends for name in theirs))
    again = [asyncio.create_task(client.add(request(name, tokens=5))) for name in theirs]
    await until(lambda: all(name in client._running for name in theirs))
    assert not any(task.done() for task in again), "they wait for their engine"
    await client.news(EngineDown("the machine is gone", final=True, rank=1, away=True))
    for name in theirs:
        del seen.ends[name]
    await asyncio.gather(*again)
    assert {client._running[name].place for name in theirs} <= {0}
    await until(lambda: all(name in seen.ends for name in theirs))
    assert {seen.ends[name].finish_reason for name in theirs} == {"length"}
    assert client.error is None
    assert client.end is None
    await client.news(EngineUp(address, info, 1))
    await client.add(request("back"))
    assert client._running["back"].place == 1
    await until(lambda: "back" in seen.ends)
