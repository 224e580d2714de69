"""Another number of engines takes the place of those that serve: requests go on, and a failure changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.core.config.tree import FrameConfig
from frame.core.processes.supervisor import EngineSupervisor
from frame.elastic.engine_set import EngineSet
from frame.elastic.sizes import refusal, resized
from frame.interfaces import EngineDeadError
from frame.ranks.client import DataParallelClient, start_engine
from tests.processes.test_client import COMMAND, Collector, request
from tests.processes.test_data_parallel import pids, until
from tests.server.running import FAKE, Running, alive, server, until as wait_until


def config(size: int, **fake: Any) -> FrameConfig:
    return FrameConfig.model_validate(
        {
            "server": {"max_engine_restarts": 1, "standby_engine": False},
            "plugin": {"fake": {"delay": 0.002, **fake}},
            "data_parallel": {"data_parallel_size": size},
            "executor": {"enable_expert_parallel": True},
        }
    )


@asynccontextmanager
async def engines(size: int, **fake: Any) -> AsyncIterator[DataParallelClient]:
    client = await start_engine(config(size, **fake), command=COMMAND)
    assert isinstance(client, DataParallelClient)
    try:
        yield client
    finally:
        await client.close()


async def scale(client: DataParallelClient, size: int) -> bool:
    changed = await client.call("scale_elastic_ep", {"new_data_parallel_size": size})
    assert isinstance(changed, bool)
    return changed


async def ranks(client: DataParallelClient) -> list[tuple[int, str | None]]:
    return [(one.rank, one.problem) for one in (await client.stats()).ranks]


async def test_engines_come_and_go_and_requests_are_divided_among_those_there_are() -> None:
    async with engines(1) as client:
        seen = Collector(client)
        assert await ranks(client) == [(0, None)]
        opened = len(os.listdir("/proc/self/fd"))
        for size in (3, 2):
            before = pids(client)
            for name in ("a", "b", "c"):
                await client.add(request(f"{name}{size}", tokens=20_000))
            assert await scale(client, size) is True
            assert await ranks(client) == [(rank, None) for rank in range(size)]
            assert client.info.num_blocks == 100 * size
            assert not any(map(alive, before))
            lost = [name for name, end in seen.ends.items() if end.fault == "lost"]
            assert sorted(lost) == [f"a{size}", f"b{size}", f"c{size}"]
            for name in lost:
                del seen.ends[name]
                await client.add(request(name, tokens=50))
            assert {client._running[name].place for name in lost} == set(range(size))
            await until(lambda lost=lost: all(name in seen.ends for name in lost))
            assert {seen.ends.pop(name).finish_reason for name in lost} == {"length"}
        assert await scale(client, 2) is False
        assert client._choice._own.sum() == pytest.approx(0)
        left = pids(client)
        await scale(client, 1)
        assert len(os.listdir("/proc/self/fd")) == opened
    assert not any(map(alive, left))


@pytest.mark.matrix
async def test_engines_that_are_killed_before_they_end_are_replaced_all_the_same() -> None:
    async with engines(2, startup=0.5) as client:
        owner, before = client.on_close.__self__.engines, pids(client)  # type: ignore[union-attr]
        scaling = asyncio.create_task(scale(client, 3))
        await until(lambda: owner._next is not owner._present)
        os.kill(before[1], signal.SIGKILL)
        assert await scaling is True
        assert await ranks(client) == [(0, None), (1, None), (2, None)]


@pytest.mark.matrix
async def test_when_one_that_starts_is_killed_the_old_number_serves() -> None:
    async with engines(2, startup=1.0) as client:
        owner = client.on_close.__self__.engines  # type: ignore[union-attr]
        scaling = asyncio.create_task(scale(client, 1))
        await until(lambda: owner._next is not owner._present and owner._next.supervisors[0]._engine is not None)
        os.kill(owner._next.supervisors[0]._engine.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"2 engines serve on, since 1 did not start: .* killed by SIGKILL"):
            await scaling
        assert await ranks(client) == [(0, None), (1, None)]


@pytest.mark.matrix
async def test_when_one_is_killed_before_it_begins_nothing_has_stopped() -> None:
    async with engines(1, libraries=0.5) as client:
        owner, before = client.on_close.__self__.engines, pids(client)  # type: ignore[union-attr]
        scaling = asyncio.create_task(scale(client, 2))
        await until(lambda: all(one._standby and one._standby._ahead for one in owner._next.supervisors.values()))
        os.kill(owner._next.supervisors[1]._standby._ahead.process.pid, signal.SIGKILL)
        said = "1 engines serve on, since 2 did not start: engine 1: .* killed by SIGKILL before it could begin"
        with pytest.raises(EngineDeadError, match=said):
            await scaling
        assert pids(client) == before
        assert client.error is None


async def test_requests_that_come_meanwhile_wait_and_are_divided() -> None:
    async with engines(1, startup=0.5) as client:
        seen = Collector(client)
        scaling = asyncio.create_task(scale(client, 2))
        await until(lambda: client.error is not None)
        assert client.end is None
        adding = [asyncio.create_task(client.add(request(name, tokens=40))) for name in ("a", "b", "c", "d")]
        with pytest.raises(RuntimeError, match="being changed already"):
            await scale(client, 1)
        assert await client.call("is_scaling_elastic_ep") is True
        await until(lambda: len(client._running) == 4)
        await client.abort(["d"])
        await asyncio.gather(scaling, *adding)
        assert sorted(client._running[name].place for name in ("a", "b", "c")) in ([0, 0, 1], [0, 1, 1])
        await until(lambda: len(seen.ends) == 3)
        assert await client.call("is_scaling_elastic_ep") is False


async def test_a_caller_that_gives_up_changes_nothing() -> None:
    async with engines(1) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await scale(client, 2)
        await until(lambda: not client._scaling)
        assert await ranks(client) == [(0, None), (1, None)]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fake", "said"),
    [
        ({"refused_from": 2}, "new_data_parallel_size 2: so many engines are impossible"),
        ({"lost_from": 2}, "1 engines serve on, since 2 did not start: engine [01]: .*worker 1 of 2 died"),
        ({"broken_from": 2}, "1 engines serve on, since 2 did not start: engine [01]: no memory is left"),
        ({"short_from": 2}, "have room for requests of 32 tokens, and there may be some of 512; a server with max_mod"),
    ],
)
async def test_when_the_new_ones_cannot_serve_the_old_number_does(fake: dict[str, int], said: str) -> None:
    async with engines(1, **fake) as client:
        before, stays = pids(client), bool(fake.keys() & {"refused_from", "lost_from"})
        with pytest.raises(ValueError if "refused_from" in fake else EngineDeadError, match=said):
            await scale(client, 2)
        assert (pids(client) == before) is stays
        assert await ranks(client) == [(0, None)]
        seen = Collector(client)
        await client.add(request("a"))
        await until(lambda: "a" in seen.ends)
        assert seen.ends["a"].finish_reason == "length"
        assert await client.call("is_scaling_elastic_ep") is False


@pytest.mark.matrix
async def test_when_the_old_number_does_not_come_back_either_requests_end_with_the_cause(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    async with engines(2, broken_if=str(gone)) as client:
        waiting = asyncio.create_task(client.on_close.__self__.wait())  # type: ignore[union-attr]
        gone.touch()
        with pytest.raises(
            EngineDeadError, match=r"2 engines do not start again: engine [01]: no memory is left; others"
        ):
            await scale(client, 1)
        assert "2 engines do not start again: engine" in str(client.end)
        with pytest.raises(EngineDeadError, match="no memory is left"):
            await client.add(request("a"))
        await asyncio.wait_for(waiting, 60)


async def test_it_is_refused_while_requests_are_held_back() -> None:
    async with engines(1) as client:
        await client.call("pause")
        before = pids(client)
        with pytest.raises(RuntimeError, match="the engines are paused: resume them before"):
            await scale(client, 2)
        await client.call("resume")
        assert pids(client) == before
        assert client.error is None


@pytest.mark.matrix
async def test_what_new_engines_would_not_know_is_refused_while_they_come() -> None:
    async with engines(1, libraries=1.0) as client:
        before, scaling = pids(client), asyncio.create_task(scale(client, 2))
        owner = client.on_close.__self__.engines  # type: ignore[union-attr]
        await until(lambda: owner._next is not owner._present)
        for method in ("pause", "sleep", "update_weights", "worker", "start_profile"):
            with pytest.raises(RuntimeError, match="number of engines is being changed; ask again when that has ended"):
                await client.call(method, {"method": "fill"} if method == "worker" else None)
        assert await client.call("is_paused") is False
        assert pids(client) == before, "they still prepare"
        assert await scaling is True
        assert await client.call("worker", {"method": "fill"}) == ["fill", "fill"]
        assert await client.call("pause") == 0
        assert await client.call("is_paused") is True


@pytest.mark.matrix
async def test_a_call_of_workers_that_came_before_is_answered() -> None:
    async with engines(1) as client:
        calling = asyncio.create_task(client.call("worker", {"method": "fill", "seconds": 2.0}))
        await asyncio.sleep(0.1)
        assert await scale(client, 2) is True
        assert await calling == ["fill"]


async def test_what_is_impossible_is_refused_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    prepare = EngineSupervisor.prepare

    async def and_note(self: EngineSupervisor, choices: Any) -> None:
        prepared.append(self.rank)
        await prepare(self, choices)

    monkeypatch.setattr(EngineSupervisor, "prepare", and_note)
    async with engines(1, refused_from=4) as client:
        with pytest.raises(ValueError, match="new_data_parallel_size 8: so many engines are impossible"):
            await scale(client, 8)
        assert prepared == [0]
        assert await scale(client, 3) is True
        assert prepared[1:] == [0, 1, 2]


@pytest.mark.matrix
async def test_processes_that_prepared_for_other_weights_are_replaced_while_the_engines_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[str] = []  # what the engines did meanwhile
    prepare, rest = EngineSet.prepare, EngineSet.rest

    async with engines(1, libraries=0.2) as client:

        async def and_other_weights(self: EngineSet, choices: Any) -> None:
            prepared.append(str(self.config.model.model))
            await prepare(self, choices)
            if len(prepared) == 1:  # as a call that came just before the engines are being replaced
                await client._engines[0].call("update_weights", {"model": "other"})
                owner = client.on_close.__self__.engines  # type: ignore[union-attr]
                await until(lambda: owner.config.model.model == "other")

        async def and_note(self: EngineSet) -> None:
            prepared.append("rest")
            await rest(self)

        monkeypatch.setattr(EngineSet, "prepare", and_other_weights)
        monkeypatch.setattr(EngineSet, "rest", and_note)
        assert await scale(client, 2) is True
        assert prepared[1:] == ["other", "rest"]
        assert await client.call("model") == "other"


async def test_what_ends_meanwhile_leaves_no_process() -> None:
    async with engines(1, startup=1.0) as client:
        owner, before = client.on_close.__self__.engines, pids(client)  # type: ignore[union-attr]
        scaling = asyncio.create_task(scale(client, 2))
        await until(
            lambda: any(one._engine for one in owner._next.supervisors.values()) and owner._next is not owner._present
        )
        coming = [one._engine.process.pid for one in owner._next.supervisors.values() if one._engine is not None]
        await client.close()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await scaling
        assert coming
        assert not any(map(alive, (*before, *coming)))


@pytest.mark.parametrize(
    ("settings", "size", "said"),
    [
        ({"enable_expert_parallel": False, "data_parallel_size": 2}, 1, "share no experts, so their number is fixed"),
        ({}, 0, "must be a whole number from 1 to 64, got 0"),
        ({}, 65, "from 1 to 64, got 65"),
        ({}, True, "got True"),
        ({}, 2.0, r"got 2\.0"),
        pytest.param({}, 10**5000, "got a number of too many digits", id="digits"),
        ({"data_parallel_size": 2, "data_parallel_rank": 0}, 1, "behind a load balancer, so their number is fixed"),
        ({"nnodes": 2, "master_addr": "10.0.0.1", "tensor_parallel_size": 2}, 2, "on several machines, so their"),
    ],
)
def test_what_is_refused_before_anything_is_asked(settings: dict[str, Any], size: Any, said: str) -> None:
    found = refusal(FrameConfig.from_flat(**{"enable_expert_parallel": True, **settings}), size)
    assert re.search(said, str(found))


def test_a_single_device_balances_no_experts_and_more_do_again() -> None:
    given = FrameConfig.from_flat(
        data_parallel_size=2, enable_expert_parallel=True, enable_eplb=True, num_redundant_experts=4
    )
    alone, again = resized(given, 1), resized(given, 4)
    assert (alone.expert_balance.enable_eplb, alone.expert_balance.num_redundant_experts) == (False, 0)
    assert again.expert_balance == given.expert_balance
    assert again.data_parallel.local_ranks == range(4)
    assert resized(FrameConfig.from_flat(**{**given_flat(), "tensor_parallel_size": 2}), 1).expert_balance.enable_eplb


def given_flat() -> dict[str, Any]:
    return {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}


BODY = {"prompt": "once upon a time", "max_tokens": 250, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = ("--plugin.fake.delay", "0.005", "--plugin.fake.vocab_size", "2048", "--disable-access-log",
                "--enable-expert-parallel", "--plugin.fake.broken_from", "4", "--api-server-count", "2",
                "--admin-uds", str(tmp_path_factory.mktemp("admin") / "socket"))  # fmt: skip
    with server(FAKE, *settings) as running:
        yield running


@pytest.fixture(scope="module")
def admin(running: Running) -> Iterator[httpx.Client]:
    running.until_said("admin routes at")
    found = re.search(r"admin routes at \S*?(/\S+)", running.text)
    assert found is not None, running.text
    with httpx.Client(base_url="http://admin", transport=httpx.HTTPTransport(uds=found.group(1)), timeout=60) as client:
        yield client


def stream(running: Running, texts: list[str]) -> threading.Thread:
    def read() -> None:
        answer = httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=60)
        texts.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def up(running: Running) -> dict[str, float]:
    text = httpx.get(f"{running.url}/metrics", timeout=60).text
    found = re.findall(r'^frame_engine_up\{engine="(\d+)",.*\} (\S+)$', text, re.MULTILINE)
    return {rank: float(value) for rank, value in found}


@pytest.mark.matrix
def test_the_route_scales_under_load_and_everybody_knows(running: Running, admin: httpx.Client) -> None:
    wanted: list[str] = []
    stream(running, wanted).join(60)
    for size in (2, 1):
        texts: list[str] = []
        threads = [stream(running, texts) for _ in range(6)]
        wait_until(lambda: httpx.get(f"{running.url}/stats").json()["engine"]["running"] == 6)
        before = running.children_named("engine")
        answer = admin.post("/scale_elastic_ep", json={"new_data_parallel_size": size, "drain_timeout": 60})
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"message": f"Scaled to {size} data parallel engines", "changed": True}
        for thread in threads:
            thread.join(60)
        assert texts == wanted * 6
        assert up(running) == dict.fromkeys(map(str, range(size)), 1.0)
        assert len(httpx.get(f"{running.url}/stats").json()["engine"]["ranks"]) == size
        now = running.children_named("engine")
        assert len(now) == size
        assert not set(now) & set(before)
        assert admin.get("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}
    running.until_said("the number of engines changes from 2 to 1")
    same = admin.post("/scale_elastic_ep", json={"new_data_parallel_size": 1}).json()
    assert same == {"message": "Nothing changed: there are 1 data parallel engines", "changed": False}


@pytest.mark.matrix
def test_a_server_that_is_told_to_stop_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    settings = ("--enable-expert-parallel", "--plugin.fake.startup", "3", "--admin-uds", str(tmp_path / "socket"))
    with server(FAKE, *settings) as running:
        wait_until(lambda: "admin routes at" in running.text)
        transport = httpx.HTTPTransport(uds=str(tmp_path / "socket"))

        answers: list[httpx.Response] = []

        def ask() -> None:
            with httpx.Client(base_url="http://a", transport=transport) as client:
                answers.append(client.post("/scale_elastic_ep", json={"new_data_parallel_size": 3}, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: "the number of engines changes from 1 to 3" in running.text)
        wait_until(lambda: len(running.children_named("engine")) == 3)
        below = running.children_named("engine")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        thread.join(60)
        assert [(one.status_code, "the server is stopping" in one.text) for one in answers] == [(503, True)]
        assert "Traceback" not in running.text
        wait_until(lambda: not any(map(alive, below)))


@pytest.mark.matrix
def test_an_api_process_that_starts_meanwhile_knows_and_refuses_calls(tmp_path: Path) -> None:
    settings = ("--enable-expert-parallel", "--plugin.fake.libraries", "1", "--admin-uds", str(tmp_path / "socket"),
                "--rpc-methods", "fill")  # fmt: skip
    with server(FAKE, *settings) as running:
        wait_until(lambda: "admin routes at" in running.text)
        transport = httpx.HTTPTransport(uds=str(tmp_path / "socket"))
        with httpx.Client(base_url="http://admin", transport=transport, timeout=60) as admin:

            def ask() -> None:
                with contextlib.suppress(httpx.HTTPError):  # the process that would answer is killed
                    admin.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})

            asking, before = threading.Thread(target=ask), set(running.children_named("engine"))
            asking.start()
            coming: list[int] = []

            def come() -> bool:  # as their own program: a parent waits for a child that is stopped before it is that
                pids = set(running.children_named("engine")) - before
                coming[:] = (pid for pid in pids if b"--journal-fd" in Path(f"/proc/{pid}/cmdline").read_bytes())
                return bool(coming)

            wait_until(come)
            for pid in coming:
                os.kill(pid, signal.SIGSTOP)
            os.kill(running.children_named("api")[0], signal.SIGKILL)
            asking.join(60)
            wait_until(lambda: httpx.get(f"{running.url}/health", timeout=60).status_code == 200)
            for route, body in (("/pause", {}), ("/collective_rpc", {"method": "fill"}), ("/start_profile", {})):
                refused = admin.post(route, json=body)
                found = refused.status_code, "ask again when that has ended" in refused.text
                assert found == (409, True), (route, refused.text)
            assert admin.get("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": True}
            for pid in coming:
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: not admin.get("/is_scaling_elastic_ep").json()["is_scaling_elastic_ep"])
            assert up(running) == {"0": 1.0, "1": 1.0}
            assert admin.post("/collective_rpc", json={"method": "fill"}).json() == {"results": ["fill", "fill"]}
            assert admin.post("/pause").status_code == 200


@pytest.mark.matrix
def test_an_api_process_that_starts_later_knows_how_many_there_are(running: Running, admin: httpx.Client) -> None:
    assert admin.post("/scale_elastic_ep", json={"new_data_parallel_size": 2}).status_code == 200
    for pid in running.children_named("api"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: running.text.count("the API process was killed") == 2)
    texts: list[str] = []
    stream(running, texts).join(60)  # it waits in the listener's queue
    assert len(texts[0]) > 250
    assert up(running) == {"0": 1.0, "1": 1.0}
    assert admin.post("/scale_elastic_ep", json={"new_data_parallel_size": 1}).status_code == 200


def test_what_the_route_refuses(running: Running, admin: httpx.Client) -> None:
    before = running.children_named("engine")
    for body, status, said in (
        ({}, 400, "new_data_parallel_size is missing"),
        ({"new_data_parallel_size": 0}, 400, "new_data_parallel_size"),
        ({"new_data_parallel_size": "two"}, 400, "new_data_parallel_size"),
        ({"new_data_parallel_size": 65}, 400, "from 1 to 64"),
        ({"new_data_parallel_size": 4097}, 400, "from 1 to 64"),
        ({"new_data_parallel_size": 2, "drain_timeout": -1}, 400, "drain_timeout"),
    ):
        answer = admin.post("/scale_elastic_ep", json=body)
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert running.children_named("engine") == before
    texts: list[str] = []
    thread = stream(running, texts)
    answer = admin.post("/scale_elastic_ep", json={"new_data_parallel_size": 4})
    thread.join(60)
    assert len(texts[0]) > 250, "the request went on"
    assert answer.status_code == 503
    assert "1 engines serve on, since 4 did not start: engine" in answer.json()["error"]["message"]
    assert up(running) == {"0": 1.0}
