from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.client import BrokenEngineError
from frame.core.processes import engine_host, standby
from frame.core.processes.channel import Channel, listen, pack
from frame.core.processes.client import RemoteEngine
from frame.core.processes.engine_host import EngineHost
from frame.core.processes.journal import NullJournal
from frame.core.processes.messages import Begin, Call, EngineUp, FromEngine, Hello, Outputs, Stage
from frame.core.processes.standby import EngineChild
from frame.interfaces import EngineDeadError, EngineOutput, EngineRequest, SamplingParams
from frame.ranks.client import start_engine
from tests.server.fake_engine import FakeEngine
from tests.server.running import alive, until

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "server" / "fake_engine.py")]


def config(restarts: int = 3, stands_by: bool = False, **fake: Any) -> FrameConfig:
    server = {"max_engine_restarts": restarts, "standby_engine": stands_by}
    return FrameConfig.model_validate({"server": server, "plugin": {"fake": fake}})


def request(name: str, tokens: int = 4, **extra: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=tokens, extra_args=extra or None)
    return EngineRequest(
        request_id=name, prompt_ids=np.arange(1, 4, dtype=np.int32), params=params, max_tokens=tokens, seed=0
    )


class Collector:
    """Consumes a client's outputs and files them by request."""

    def __init__(self, client: RemoteEngine) -> None:
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, EngineOutput] = {}
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._run(client))

    async def _run(self, client: RemoteEngine) -> None:
        async for batch in client.outputs():
            for output in batch:
                self.ids.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output
            self.changed.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def end(self, name: str) -> EngineOutput:
        await self.until(lambda: name in self.ends)
        return self.ends[name]


@pytest.fixture
async def client() -> AsyncIterator[RemoteEngine]:
    client = await start_engine(config(delay=0.002), command=COMMAND)
    yield client
    await client.close()


def engine_pid(client: RemoteEngine) -> int:
    pid = client.on_close.__self__.engines.supervisors[0]._engine.process.pid  # type: ignore[union-attr]
    assert isinstance(pid, int)
    return pid


async def test_requests_outputs_and_calls(client: RemoteEngine) -> None:
    collector = Collector(client)
    assert client.error is None
    assert client.info.platform == "fake"
    for number in range(20):
        await client.add(request(f"r{number}", 4 + number))
    for number in range(20):
        assert (await collector.end(f"r{number}")).finish_reason == "length"
        assert len(collector.ids[f"r{number}"]) == 4 + number
    assert collector.ids["r0"] == [1, 2, 3, 1]
    assert (await client.stats()).generated_tokens == sum(4 + number for number in range(20))
    assert await client.call("echo", {"a": 1}) == {"a": 1}
    with pytest.raises(RuntimeError, match="no method 'nonsense'"):
        await client.call("nonsense")


async def test_steps_that_wait_for_the_consumer_come_as_one_batch(client: RemoteEngine) -> None:
    await client.add(request("lagging", 6))
    async with asyncio.timeout(60):
        while client._unfinished:
            await asyncio.sleep(0.01)
    batch = await anext(client.outputs())
    assert [output.token_ids for output in batch] == [[1], [2], [3], [1], [2], [3]]
    assert batch[-1].finish_reason == "length"


async def test_abort_ends_a_request(client: RemoteEngine) -> None:
    collector = Collector(client)
    await client.add(request("long", 400))
    await collector.until(lambda: len(collector.ids.get("long", [])) > 3)
    await client.abort(["long", "unknown"])
    assert (await collector.end("long")).finish_reason == "abort"
    assert (await client.stats()).running == 0


async def test_a_refused_request_and_a_failed_step_leave_the_engine_alive(client: RemoteEngine) -> None:
    collector = Collector(client)
    await client.add(request("never", fault="add"))
    assert (await collector.end("never")).error == "this request can never run"
    await client.add(request("bad", 100, fault="step"))
    end = await collector.end("bad")
    assert end.finish_reason == "error"
    assert end.error is not None
    assert "the device said no" in end.error
    await client.add(request("good"))
    assert (await collector.end("good")).finish_reason == "length"


async def test_a_killed_engine_fails_its_requests_and_comes_back(client: RemoteEngine) -> None:
    collector = Collector(client)
    await client.add(request("doomed", 400))
    await collector.until(lambda: "doomed" in collector.ids)
    pid = engine_pid(client)
    os.kill(pid, signal.SIGKILL)
    assert ((await collector.end("doomed")).finish_reason, collector.ends["doomed"].fault) == ("error", "lost")
    assert client.error is not None
    early = asyncio.create_task(client.add(request("early")))
    gone = asyncio.create_task(client.add(request("gone")))
    await asyncio.sleep(0.01)
    assert not early.done()
    await client.abort(["gone"])
    assert (await collector.end("early")).finish_reason == "length"
    await gone
    assert "gone" not in collector.ids
    async with asyncio.timeout(60):
        while client.error is not None:
            await asyncio.sleep(0.02)
    assert engine_pid(client) != pid
    await client.add(request("after"))
    assert (await collector.end("after")).finish_reason == "length"


async def test_a_starting_engine_that_sends_nonsense_is_started_again(
    client: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = client.on_close.__self__.engines.supervisors[0]  # type: ignore[union-attr]
    begin, begun = supervisor._begin, []

    async def nonsense_first(engine: EngineChild) -> Any:
        begun.append(engine)
        if len(begun) == 1:
            raise ValueError("nonsense")
        return await begin(engine)

    monkeypatch.setattr(supervisor, "_begin", nonsense_first)
    os.kill(engine_pid(client), signal.SIGKILL)
    async with asyncio.timeout(60):
        while len(begun) < 2 or client.error is not None:
            await asyncio.sleep(0.02)
    collector = Collector(client)
    await client.add(request("after"))
    assert (await collector.end("after")).finish_reason == "length"


async def test_an_answer_that_cannot_be_read_costs_the_requests_and_not_the_engine() -> None:
    address = f"@frame-test-client-{os.getpid()}"
    listener = listen(address)
    client = RemoteEngine()
    collector = Collector(client)
    await client.news(EngineUp(address, FakeEngine(FrameConfig()).info))
    first, _ = listener.accept()
    await client.add(request("lost"))
    first.sendall(pack({"type": "Nonsense"}))
    end = await collector.end("lost")
    assert end.finish_reason == "error"
    assert "cannot be read" in (end.error or "")
    second, _ = await asyncio.to_thread(listener.accept)
    async with asyncio.timeout(60):
        while client.error is not None:
            await asyncio.sleep(0.01)
    await client.add(request("good"))
    second.sendall(pack(Outputs([EngineOutput(request_id="good", token_ids=[1], finish_reason="length")])))
    assert (await collector.end("good")).finish_reason == "length"
    await client.close()
    for connection in (first, second, listener):
        connection.close()


async def test_a_closed_client_takes_no_engine_that_was_still_starting() -> None:
    address = f"@frame-test-closed-{os.getpid()}"
    with listen(address):
        client = RemoteEngine()
        await client.close()
        await client.news(EngineUp(address, FakeEngine(FrameConfig()).info))
        assert client.end == "the engine was shut down"
        assert client._reader is None


async def until_up(client: RemoteEngine) -> None:
    async with asyncio.timeout(60):
        while client.error is not None:
            await asyncio.sleep(0.02)


async def test_a_new_engine_has_the_weights_of_the_last_one(client: RemoteEngine, tmp_path: Path) -> None:
    assert await client.call("model") == ""
    await client.call("update_weights", {"model": str(tmp_path)})
    await client.call("update_weights", {"revision": "main"})
    with pytest.raises(RuntimeError, match="neither the new nor the old weights"):
        await client.call("update_weights", {"model": "broken"})  # which ends the engine
    async with asyncio.timeout(60):
        while client.error is None:
            await asyncio.sleep(0.02)
        await until_up(client)
    assert await client.call("model") == str(tmp_path)


def test_the_last_words_of_an_engine_are_out_before_its_process_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_late(channel: Channel, message: Any) -> None:
        time.sleep(0.2)
        channel._socket.sendall(pack(message))

    monkeypatch.setattr(Channel, "send", send_late)
    monkeypatch.setattr(engine_host, "LAST_WORDS_SECONDS", 20.0)
    address = f"@frame-test-last-words-{os.getpid()}"
    host = EngineHost(FakeEngine(FrameConfig()), listen(address), NullJournal(), Begin())

    def run() -> None:
        with pytest.raises(BrokenEngineError):
            host.run()

    thread = threading.Thread(target=run)
    thread.start()
    with socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as silent:
        for each in (silent, ours):
            each.connect(f"\0{address[1:]}")
            each.sendall(pack(Hello(str(each.fileno()))))
        ours.sendall(pack(Call(7, "update_weights", {"model": "broken"})))
        thread.join(60)
        ours.setblocking(False)
        reply = Channel(ours, FromEngine).receive()
    assert (reply.id, "neither the new nor the old weights" in reply.error) == (7, True)


def test_an_engine_that_nobody_asks_readies_itself_and_then_waits() -> None:
    class Unready(FakeEngine):
        left, told = 3, threading.Event()

        def has_idle_work(self) -> bool:
            return self.left > 0

        def step(self) -> list[EngineOutput]:
            self.left -= 1
            if not self.left:
                self.told.set()
            return super().step()

    engine = Unready(FrameConfig())
    host = EngineHost(engine, listen(f"@frame-test-idle-{os.getpid()}"), NullJournal(), Begin())
    thread = threading.Thread(target=host.run)
    thread.start()
    assert engine.told.wait(60)
    host.stop()
    thread.join(60)
    assert engine.left == 0, "it went on without work"


def test_an_engine_that_holds_blocks_waits_for_requests_between_its_steps() -> None:
    class Holding(FakeEngine):
        patience, steps = 3.0, 0

        def has_unfinished(self) -> bool:
            return True

        def step(self) -> list[EngineOutput]:
            self.steps += 1
            return super().step()

        def call(self, method: str, arguments: Any = None, timeout: float | None = None) -> Any:
            self.patience = 0.0
            return method

    engine, address = Holding(FrameConfig()), f"@frame-test-holding-{os.getpid()}"
    host = EngineHost(engine, listen(address), NullJournal(), Begin())
    thread = threading.Thread(target=host.run)
    thread.start()
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect(f"\0{address[1:]}")
        ours.sendall(pack(Hello("me")))
        time.sleep(0.2)
        steps = engine.steps
        ours.sendall(pack(Call(1, "anything", {})))
        reply = Channel(ours, FromEngine).receive()
    host.stop()
    thread.join(60)
    assert (reply.id, reply.error) == (1, None)
    assert steps <= 2, "it steps for what has come, and waits"


def test_a_slow_control_method_beside_requests_is_no_hang() -> None:
    beats: list[bool] = []

    class Counting(NullJournal):
        def beat(self, idle: bool) -> None:
            beats.append(idle)

    class Busy(FakeEngine):
        called = threading.Event()

        def has_unfinished(self) -> bool:
            return not self.called.is_set()

        def call(self, method: str, arguments: Any = None, timeout: float | None = None) -> Any:
            assert beats[-1], "what follows counts as a step"
            self.called.set()

    engine, address = Busy(FrameConfig()), f"@frame-test-slow-{os.getpid()}"
    host = EngineHost(engine, listen(address), Counting(), Begin())
    thread = threading.Thread(target=host.run)
    thread.start()
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect(f"\0{address[1:]}")
        ours.sendall(pack(Hello("me")) + pack(Call(1, "anything", {})))
        reply = Channel(ours, FromEngine).receive()
    engine.called.set()
    host.stop()
    thread.join(60)
    assert (reply.id, reply.error) == (1, None)


def test_a_client_that_was_not_heard_yet_is_told_of_the_end() -> None:
    address = f"@frame-test-unheard-{os.getpid()}"
    host = EngineHost(FakeEngine(FrameConfig()), listen(address), NullJournal(), Begin())
    thread = threading.Thread(target=host.run)
    thread.start()
    with socket.socket(socket.AF_UNIX) as unheard:
        unheard.settimeout(60)
        unheard.connect(f"\0{address[1:]}")
        while not host._accepted:
            time.sleep(0.01)
        host.stop()
        assert unheard.recv(1) == b""
    thread.join(60)
    assert not thread.is_alive()


async def test_too_many_deaths_in_a_row_are_final() -> None:
    client = await start_engine(config(restarts=1), command=COMMAND)
    try:
        os.kill(engine_pid(client), signal.SIGKILL)
        while client.error is None:
            await asyncio.sleep(0.01)
        await until_up(client)
        os.kill(engine_pid(client), signal.SIGKILL)
        async with asyncio.timeout(60):
            while "deaths in a row" not in (client.error or ""):
                await asyncio.sleep(0.02)
        assert client.error == "the engine process was killed by SIGKILL (2 deaths in a row)"
        with pytest.raises(EngineDeadError, match="2 deaths in a row"):
            await client.add(request("late"))
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"broken": "KV pool too small for one request"}, "^KV pool too small for one request$"),
        ({"dies": 9}, "the engine process ended with status 9 before it was ready"),
    ],
)
async def test_death_before_ready_gives_the_cause(fake: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineDeadError, match=message):
        await start_engine(config(**fake), command=COMMAND)


async def test_start_up_limit() -> None:
    tree = FrameConfig.model_validate({"server": {"ready_seconds": 1.5}, "plugin": {"fake": {"startup": 60}}})
    with pytest.raises(EngineDeadError, match=r"not ready after 1\.5 seconds"):
        await start_engine(tree, command=COMMAND)


async def test_stages_are_reported_and_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    take = RemoteEngine.news

    async def news(client: RemoteEngine, message: Any) -> None:
        told.append(message)
        await take(client, message)

    monkeypatch.setattr(RemoteEngine, "news", news)
    client = await start_engine(config(), command=COMMAND)
    assert [message.name for message in told if isinstance(message, Stage)] == ["pretending"]
    pid = engine_pid(client)
    assert alive(pid)
    await client.close()
    await client.close()
    assert not alive(pid)


def test_the_engine_ends_with_its_parent() -> None:
    script = (
        "import asyncio, sys\nfrom frame.core.config.tree import FrameConfig\n"
        "from frame.ranks.client import start_engine\n"
        "async def main():\n"
        f"    client = await start_engine(FrameConfig(), command={COMMAND!r})\n"
        "    print(client.on_close.__self__.engines.supervisors[0]._engine.process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\nasyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(pid))


def test_the_client_imports_no_torch() -> None:
    script = "import sys, frame.ranks.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


async def test_a_request_waits_on_when_the_engine_that_came_is_gone_at_once() -> None:
    client = RemoteEngine()
    adding = asyncio.create_task(client.add(request("early")))
    await asyncio.sleep(0)
    client._up.set()
    client._up.clear()
    await asyncio.sleep(0.01)
    assert not adding.done()
    await client.close()
    with pytest.raises(EngineDeadError):
        await adding


async def test_a_request_that_is_no_message_is_refused_and_forgotten(client: RemoteEngine) -> None:
    for value in (2**70, object()):
        with pytest.raises(ValueError, match="cannot be sent to the engine"):
            await client.add(request("odd", value=value))
    params = SamplingParams(max_tokens=4, ignore_eos=1)  # type: ignore[arg-type]
    for change in ({"params": params}, {"priority": 1.5}, {"kv_transfer": [1]}):
        with pytest.raises(ValueError, match="cannot be sent to the engine: Expected"):
            await client.add(msgspec.structs.replace(request("odd"), **change))
    collector = Collector(client)
    await client.add(request("odd"))
    assert (await collector.end("odd")).finish_reason == "length"


def break_connection(client: RemoteEngine) -> None:
    channel = client._channel
    assert channel is not None
    channel._writer.transport.abort()


async def test_a_connection_that_ends_while_the_engine_lives_is_made_again(client: RemoteEngine) -> None:
    collector = Collector(client)
    await client.add(request("cut", 400))
    await collector.until(lambda: "cut" in collector.ids)
    pid = engine_pid(client)
    break_connection(client)
    assert (await collector.end("cut")).fault == "lost"
    collector.ends.clear()
    collector.ids.clear()
    await client.add(request("cut", 4))  # waits for the connection; the engine has forgotten the one before
    assert (await collector.end("cut")).finish_reason == "length"
    assert collector.ids["cut"] == [1, 2, 3, 1]
    assert (client.error, engine_pid(client)) == (None, pid)
    assert (await client.stats()).running == 0


async def test_requests_end_when_connections_break_again_and_again(client: RemoteEngine) -> None:
    collector = Collector(client)
    faults = []
    for number in range(5):
        await client.add(request(f"r{number}", 400))
        await collector.until(lambda name=f"r{number}": name in collector.ids)
        break_connection(client)
        faults.append((await collector.end(f"r{number}")).fault)
    assert faults == ["lost"] * 3 + ["engine"] * 2
    await client.add(request("after"))
    assert (await collector.end("after")).finish_reason == "length"


async def ahead(client: RemoteEngine) -> EngineChild:
    """The standby engine."""
    supervisor = client.on_close.__self__.engines.supervisors[0]  # type: ignore[union-attr]
    async with asyncio.timeout(60):
        while supervisor._standby._ahead is None:
            await asyncio.sleep(0.01)
    child: EngineChild = supervisor._standby._ahead
    return child


async def test_the_process_that_stands_by_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "DELAY_SECONDS", 0.0)
    client = await start_engine(config(stands_by=True), command=COMMAND)
    collector = Collector(client)
    for number in range(2):
        waiting = (await ahead(client)).process.pid
        assert waiting != engine_pid(client)
        os.kill(engine_pid(client), signal.SIGKILL)
        async with asyncio.timeout(60):
            while engine_pid(client) != waiting or client.error is not None:
                await asyncio.sleep(0.01)
        await client.add(request(f"r{number}"))
        assert (await collector.end(f"r{number}")).finish_reason == "length"
    last = (await ahead(client)).process.pid
    await client.close()
    assert not alive(last)


async def test_the_death_of_a_process_that_stands_by_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standby, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(standby, "_AGAIN_SECONDS", 0.0)
    client = await start_engine(config(stands_by=True), command=COMMAND)
    first = (await ahead(client)).process.pid
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        while (await ahead(client)).process.pid == first:
            await asyncio.sleep(0.01)
    await client.close()
    assert "the standby engine was killed by SIGKILL" in caplog.text


async def test_the_cause_for_which_a_process_cannot_stand_by_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(standby, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(standby, "_AGAIN_SECONDS", 0.0)
    gone = tmp_path / "gone"
    client = await start_engine(config(stands_by=True, refused_if=str(gone)), command=COMMAND)
    gone.touch()
    os.kill((await ahead(client)).process.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while "the standby engine ended" not in caplog.text:
            await asyncio.sleep(0.01)
    gone.unlink()
    await client.add(request("meanwhile"))
    assert (await Collector(client).end("meanwhile")).finish_reason == "length"
    await client.close()
    line = "the standby engine ended with status 1: the model has gone; another is started in a minute"
    assert line in [one.getMessage() for one in caplog.records]


async def test_a_process_that_stands_by_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "DELAY_SECONDS", 0.0)
    client = await start_engine(config(stands_by=True), command=COMMAND)
    collector = Collector(client)
    waiting = await ahead(client)
    os.kill(waiting.process.pid, signal.SIGKILL)
    pid = engine_pid(client)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while engine_pid(client) in (pid, waiting.process.pid) or client.error is not None:
            await asyncio.sleep(0.01)
    await client.add(request("after"))
    assert (await collector.end("after")).finish_reason == "length"
    await client.close()
