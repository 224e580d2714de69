"""When an API process that dies is started again. The processes are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from frame.core.config.tree import FrameConfig
from frame.core.processes import api_supervisor
from frame.core.processes.api_supervisor import ApiSupervisor
from frame.core.processes.channel import AsyncChannel
from frame.core.processes.messages import ApiOrder, ApiReport, EngineDown, EngineNews, Scaled, Serving
from frame.served.news import AdapterNews


async def unasked(size: int) -> Scaled:
    raise AssertionError(f"nobody asked for {size} engines")


class Channel:
    """Says once that the process serves."""

    def __init__(self) -> None:
        self._messages: list[Any] = [Serving(["m"]), None]

    async def receive(self) -> Any:
        return self._messages.pop(0)

    async def send(self, *messages: Any) -> None:
        assert not messages, "there is no engine yet"


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

    async def send(self, *messages: Any) -> None:
        first, self.got = not self.got, [*self.got, *messages]
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


class Late:
    """A process at the other end of a socket, which reads nothing until it is asked to."""

    def __init__(self, ours: AsyncChannel, theirs: AsyncChannel) -> None:
        self.channel, self._theirs = ours, theirs

    @classmethod
    async def born(cls) -> Late:
        ours, theirs = socket.socketpair()
        return cls(await AsyncChannel.wrap(ours, ApiReport), await AsyncChannel.wrap(theirs, ApiOrder))

    async def read(self, count: int) -> list[Any]:
        """The next messages."""
        return [await asyncio.wait_for(self._theirs.receive(), 60) for _ in range(count)]

    def close(self) -> None:
        self.channel.close()
        self._theirs.close()


#: More than a socket and its channel hold for a process that does not read.
LONG = "x" * (4 << 20)


@contextlib.asynccontextmanager
async def supervising(
    monkeypatch: pytest.MonkeyPatch, told: Sequence[EngineNews], children: Sequence[Late]
) -> AsyncIterator[ApiSupervisor]:
    """A supervisor that knows what it was `told` and has started these processes."""
    left = list(children)

    async def spawn(*arguments: Any) -> Late:
        return left.pop(0)

    monkeypatch.setattr(api_supervisor, "spawn", spawn)
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(socket.socket()) for _ in children]
        supervisor = ApiSupervisor(FrameConfig(), listeners, lambda names, death: None, on_scale=unasked)
        for message in told:
            await supervisor.tell(message)
        running = asyncio.create_task(supervisor.run())
        while len(supervisor._children) < len(children):
            await asyncio.sleep(0)
        yield supervisor
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for child in children:
            child.close()


async def test_a_process_that_starts_hears_the_last_news_of_an_engine_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine fails while what was known of it before is still on its way to a process that does not read yet."""
    child = await Late.born()
    before, after = (EngineDown(text, rank=1) for text in ("before", "after"))
    async with supervising(monkeypatch, [EngineDown(LONG), before], [child]) as supervisor:
        telling = asyncio.create_task(supervisor.tell(after))
        await asyncio.sleep(0.05)
        assert [one.error for one in await child.read(3)] == [LONG, "before", "after"]
        await telling


async def test_a_process_that_does_not_read_keeps_no_news_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two parts of the server tell meanwhile comes to all in one order."""
    slow, quick = await Late.born(), await Late.born()
    async with supervising(monkeypatch, [], [slow, quick]) as supervisor:
        texts = [LONG, "first", "second"]
        telling = [asyncio.create_task(supervisor.tell(EngineDown(text, rank=n))) for n, text in enumerate(texts)]
        assert [one.error for one in await quick.read(3)] == texts
        assert [one.error for one in await slow.read(3)] == texts
        await asyncio.gather(*telling)
