"""When an API process that dies is started again. The processes are fakes."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from frame.core.config.tree import FrameConfig
from frame.core.processes import api_supervisor
from frame.core.processes.api_supervisor import ApiSupervisor
from frame.core.processes.messages import Scaled, Serving
from frame.served.news import AdapterNews


async def unasked(size: int) -> Scaled:
    raise AssertionError(f"nobody asked for {size} engines")


class Channel:
    """Says once that the process serves."""

    def __init__(self) -> None:
        self._messages: list[Any] = [Serving(["m"]), None]

    async def receive(self) -> Any:
        return self._messages.pop(0)


class Mortal:
    """A process that serves and dies at once."""

    def __init__(self) -> None:
        self.channel = Channel()

    async def death(self) -> str:
        await asyncio.sleep(0)
        return "ended with status 1"


@pytest.mark.parametrize(("steady", "fails"), [(60.0, True), (0.0, False)])
async def test_deaths_count_in_a_row(monkeypatch: pytest.MonkeyPatch, steady: float, fails: bool) -> None:
    num_started, enough = 0, asyncio.Event()

    async def spawn(*_: Any) -> Any:
        nonlocal num_started
        num_started += 1
        if num_started > 10:
            enough.set()
            await asyncio.Event().wait()
        return Mortal()

    monkeypatch.setattr(api_supervisor, "spawn", spawn)
    monkeypatch.setattr(api_supervisor, "STEADY_SECONDS", steady)
    config = FrameConfig.model_validate({"server": {"max_engine_restarts": 3}})
    with socket.socket() as listener:
        supervisor = ApiSupervisor(config, [listener], lambda names, death: None, on_scale=unasked)
        running = asyncio.create_task(supervisor.run())
        if fails:
            assert await asyncio.wait_for(running, 60) == "the API process ended with status 1"
            assert num_started == 4
        else:
            await asyncio.wait_for(enough.wait(), 60)
            assert not running.done()
            assert num_started == 11
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Slow:
    """A process that takes its first message when it is let; all others at once."""

    def __init__(self) -> None:
        self.channel, self.got, self.asked, self.let = self, list[Any](), asyncio.Event(), asyncio.Event()

    async def send(self, message: Any) -> None:
        first, self.got = not self.got, [*self.got, message]
        if first:
            self.asked.set()
            await self.let.wait()

    async def receive(self) -> Any:
        await asyncio.Event().wait()


async def test_a_process_that_starts_hears_the_last_news_of_an_adapter_last(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Slow()

    async def spawn(*_: Any) -> Any:
        return child

    monkeypatch.setattr(api_supervisor, "spawn", spawn)
    with socket.socket() as listener:
        supervisor = ApiSupervisor(FrameConfig(), [listener], lambda names, death: None, on_scale=unasked)
        supervisor._adapters = {name: AdapterNews(name, "/folder") for name in ("one", "two")}
        running = asyncio.create_task(supervisor.run())
        await asyncio.wait_for(child.asked.wait(), 60)
        gone = AdapterNews("two")
        supervisor._adapters["two"] = gone  # as when another process unloads it
        await supervisor._send_all(gone)
        child.let.set()
        await asyncio.sleep(0.01)
        assert [one for one in child.got if one.name == "two"][-1] == gone
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
