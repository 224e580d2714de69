"""Engine processes of one model: those of a dense one are alone, those that share experts step and die together."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.interfaces import EngineDeadError
from frame.ranks.client import DataParallelClient, start_engine
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, prompts, request, running, tokens_of
from tests.parallel.stalling import STALLS, offer
from tests.processes.test_client import Collector
from tests.processes.test_data_parallel import pids, until

NUM_REQUESTS = 6


def settings(folder: Path, **values: Any) -> dict[str, Any]:
    return {**SMALL, "model": str(folder), "num_threads": 1, "standby_engine": False, **values}


def wanted() -> list[Any]:
    return [request(f"{place}", prompt, 20 + 7 * place) for place, prompt in enumerate(prompts(400)[:NUM_REQUESTS])]


def expected(folder: Path) -> dict[str, list[int]]:
    with running(from_flat(settings(folder)), Registry.load()) as engine:
        return {name: list(tokens_of(found)) for name, found in drain(engine, wanted()).items()}


async def served(client: DataParallelClient, seen: Collector) -> dict[str, list[int]]:
    for one in wanted():
        await client.add(one)
    await until(lambda: len(seen.ends) == NUM_REQUESTS, 120)
    assert {end.finish_reason for end in seen.ends.values()} == {"length"}
    return {name: seen.ids[name] for name in seen.ends}


async def idle_seconds(client: DataParallelClient) -> float:
    """Processor time that the engines take in a second, in which they launch no step."""

    def taken() -> float:
        times = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids(client)]
        return sum(float(part) for found in times for part in found) / os.sysconf("SC_CLK_TCK")

    async with asyncio.timeout(60):
        while True:  # the wave ends with steps of no requests
            steps, before = (await client.stats()).steps, taken()
            await asyncio.sleep(1)
            if (await client.stats()).steps == steps:
                return taken() - before


@pytest.mark.matrix
@pytest.mark.timeout(300)
async def test_engines_that_share_experts_give_the_tokens_of_one_and_start_again_together(tmp_path: Path) -> None:
    """One of them has the requests of both experts' halves; a killed one ends both, and the requests go on."""
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    alone = expected(folder)
    config = from_flat(settings(folder, data_parallel_size=2, enable_expert_parallel=True))
    client = await start_engine(config)
    assert isinstance(client, DataParallelClient)
    seen = Collector(client)
    try:
        assert await served(client, seen) == alone
        assert await idle_seconds(client) < 0.3, "engines without requests sleep"
        single = wanted()[0]
        seen.ids.clear(), seen.ends.clear()
        await client.add(single)  # the other engine has none
        await until(lambda: bool(seen.ends), 60)
        assert seen.ids == {"0": alone["0"]}
        seen.ids.clear(), seen.ends.clear()
        before = pids(client)
        for one in wanted():
            await client.add(one)
        await until(lambda: len(seen.ids) == NUM_REQUESTS, 60)
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: len(seen.ends) == NUM_REQUESTS, 60)
        lost = [name for name, end in seen.ends.items() if end.fault == "lost" and end.finish_reason == "error"]
        assert lost, "all requests had ended before the engine died"
        for name in lost:
            del seen.ends[name], seen.ids[name]
        await asyncio.gather(*(client.add(one) for one in wanted() if one.request_id in lost))
        await until(lambda: len(seen.ends) == NUM_REQUESTS, 120)
        assert {name: seen.ids[name] for name in lost} == {name: alone[name] for name in lost}
        assert not set(before) & set(pids(client))
    finally:
        await client.close()


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
async def test_an_engine_that_is_stopped_is_named_and_not_one_that_waits_for_it(rank: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    values = settings(folder, data_parallel_size=2, enable_expert_parallel=True, hang_seconds=4.0)
    client = await start_engine(from_flat(values))
    assert isinstance(client, DataParallelClient)
    seen = Collector(client)
    try:
        for one in wanted():
            await client.add(one)
        await until(lambda: bool(seen.ids), 60)
        os.kill(pids(client)[rank], signal.SIGSTOP)
        other = client._engines[1 - rank]
        await until(lambda: other.error is not None, 30)
        said = f"engine {rank}, with which it shares experts, is gone: the engine process hung: "
        await until(lambda: said in str(other.error), 10)
        await until(lambda: client.error is None, 60)
    finally:
        await client.close()


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rank", "tensor", "engine"),
    [
        pytest.param(0, 1, 0, marks=pytest.mark.matrix, id="the first engine"),
        pytest.param(1, 1, 1, id="the second engine"),
        pytest.param(1, 2, 0, marks=pytest.mark.matrix, id="a worker of the only engine that has a request"),
        pytest.param(2, 2, 1, marks=pytest.mark.matrix, id="a worker of the second engine"),
    ],
)
async def test_an_engine_that_never_comes_to_an_exchange_is_named(
    rank: int, tensor: int, engine: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process runs, and so do its workers, as those do that wait for it; which are the first to give up is luck."""
    offer(monkeypatch)
    parallel = {"data_parallel_size": 2, "tensor_parallel_size": tensor, "enable_expert_parallel": True}
    values = settings(make_checkpoint(tmp_path, "qwen3-moe"), **parallel, hang_seconds=6.0, **STALLS)
    client = await start_engine(from_flat(values))
    assert isinstance(client, DataParallelClient)
    seen = Collector(client)
    try:
        for one in wanted():
            await client.add(one)
        await until(lambda: len(seen.ends) == NUM_REQUESTS, 60)
        await client.call("worker", {"method": "stall", "rank": rank})
        for one in wanted()[: 1 if (rank, tensor) == (1, 2) else NUM_REQUESTS]:
            await client.add(one)
        other = client._engines[1 - engine]
        await until(lambda: other.error is not None, 60)
        await until(lambda: "with which it shares experts" in str(other.error), 10)
        said = str(other.error)
        assert f"engine {engine}, with which it shares experts, is gone: " in said
        assert re.search(r"it is at step \d+ and exchange \d+ with the other engines in it, and they wait for it", said)
        await until(lambda: client.error is None, 60)
    finally:
        await client.close()


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3-moe", marks=pytest.mark.matrix)])
async def test_engines_of_two_workers_each(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family)
    shared = {"enable_expert_parallel": True} if family == "qwen3-moe" else {}
    client = await start_engine(from_flat(settings(folder, data_parallel_size=2, tensor_parallel_size=2, **shared)))
    assert isinstance(client, DataParallelClient)
    try:
        assert await served(client, Collector(client)) == expected(folder)
    finally:
        await client.close()


@pytest.mark.matrix
async def test_experts_are_shared_by_engines_of_one_server(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    values = settings(folder, data_parallel_size=2, data_parallel_rank=1, enable_expert_parallel=True)
    with pytest.raises(EngineDeadError, match="engines that share experts are started by one server"):
        await start_engine(from_flat(values))


@pytest.mark.matrix
async def test_a_dense_model_has_no_experts_to_share(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    with pytest.raises(EngineDeadError, match="enable_expert_parallel: model LlamaForCausalLM has no experts"):
        await start_engine(from_flat(settings(folder, data_parallel_size=2, enable_expert_parallel=True)))
