"""Servers in this process that answer as a test says, and a front before them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from frame.core.plugin_host.registry import Registry
from frame.core.processes.listeners import bind, url
from frame.interfaces import RoutePolicy, Setup
from frame.routing.process import FrontParts, make_front
from frame.routing.settings import add_flags, settings_of
from frame.settings import FlagParser

CHAT = "/v1/chat/completions"


@dataclass
class Seen:
    """A request as it arrived, its head in the bytes that were sent."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Behaviour = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


def reply(status: int = 200, body: Any = None, **headers: str) -> Behaviour:
    """Answers in one piece."""

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{lines}\r\n"
        writer.write(head.encode() + data)

    return answer


async def die(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Breaks the connection instead of answering."""
    writer.transport.abort()


def stream(*events: bytes, pause: asyncio.Event | None = None, end: bool = True) -> Behaviour:
    """Answers with events, of which the second and later ones wait for `pause`; without `end` it breaks off."""

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nX-Own: yes\r\n\r\n"
        writer.write(head)
        for place, event in enumerate(events):
            if place and pause is not None:
                await pause.wait()
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        if end:
            writer.write(b"0\r\n\r\n")
        else:
            await writer.drain()
            writer.transport.abort()

    return answer


@dataclass
class FakeServer:
    """`behave` answers what is no question about health or load. `health` is the status of the former."""

    behave: Behaviour = field(default_factory=lambda: reply(200, {"from": "?"}))
    health: int = 200
    load: Any = None
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    asked: list[Seen] = field(default_factory=list)
    connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                seen = await _read(reader)
                if seen.target in ("/health", "/load"):
                    self.asked.append(seen)
                    status = self.health if seen.target == "/health" else 404 if self.load is None else 200
                    await reply(status, self.load)(seen, writer)
                    continue
                self.seen.append(seen)
                answering = asyncio.ensure_future(self.behave(seen, writer))
                watch = asyncio.create_task(_until_gone(reader))
                await asyncio.wait((answering, watch), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    self.left.set()
                    answering.cancel()
                watch.cancel()
                await asyncio.gather(answering, watch, return_exceptions=True)
        writer.close()
        self._writers.discard(writer)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self.handle, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Ends as a process does that is killed."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            self._server = None
        await asyncio.sleep(0)


async def _until_gone(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.005)


async def _read(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    seen = Seen(method, target, headers, b"")
    if (length := seen.header("content-length")) is not None:
        seen.body = await reader.readexactly(int(length))
    elif seen.header("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            seen.body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    return seen


@contextlib.asynccontextmanager
async def servers(*behaviours: Behaviour) -> AsyncIterator[list[FakeServer]]:
    """A server for each behaviour."""
    made = [FakeServer(behave) for behave in behaviours]
    try:
        for each in made:
            await each.start()
        yield made
    finally:
        for each in made:
            await each.stop()


_registry = functools.cache(Registry.load)


class Fronted(FrontParts):
    """A front that listens at `url`."""

    url: str
    client: httpx.AsyncClient


@contextlib.asynccontextmanager
async def front(*arguments: str, policy: RoutePolicy | None = None) -> AsyncIterator[Fronted]:
    """A front as these arguments make it. It looks at servers once, and again where a test has it do so."""
    parser = FlagParser(prog="frame route")
    add_flags(parser)
    settings = settings_of(parser.parse_args([*arguments, "--port", "0", "--log-level", "warning"]))
    registry = _registry()
    if policy is None:
        provider = registry.select("route-policy", settings.policy, lambda kind: None)
        policy = registry.make("route-policy", provider, Setup(), settings.config)
    parts = make_front(settings, policy, settings.policy)
    listener = bind(settings.config.server)
    await parts.watch.look()
    serving = asyncio.create_task(parts.http.serve(sockets=[listener]))
    made = Fronted(*parts)
    made.url = url(listener)
    try:
        async with httpx.AsyncClient(base_url=made.url, timeout=60, trust_env=False) as made.client:
            yield made
    finally:
        parts.http.should_exit = parts.http.force_exit = True
        await serving
        await parts.upstream.close()
        if parts.followers is not None:
            parts.followers.close()
        listener.close()


@contextlib.asynccontextmanager
async def turns(*behaviours: Behaviour, retries: int = 2) -> AsyncIterator[tuple[list[FakeServer], Fronted]]:
    """Servers that take turns, and the front before them."""
    async with servers(*behaviours) as made:
        urls = [server.url for server in made]
        async with front(*urls, "--policy", "round-robin", "--max-retries", str(retries)) as fronted:
            yield made, fronted
