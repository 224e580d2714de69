"""A fake OpenAI server in a thread: it streams words, cuts its bytes where it hurts, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeOpenAI:
    """`piece` is the size of the pieces that its events are cut into; `fail` answers the n-th requests with 429;
    `broken` streams end early, `odd` is sent first; `card` is added to what it says of its model."""

    piece: int = 7
    fail: frozenset[int] = frozenset()
    broken: bool = False
    odd: bytes = b""
    delay: float = 0.0
    card: dict[str, Any] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _now: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self.answer(lines[0].split()[1], headers, body, writer)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def answer(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            reply(writer, "200 OK", {"data": [{"id": "fake", **self.card}]})
            return
        self.bodies.append(json.loads(body))
        self.headers.append(headers)
        if len(self.bodies) - 1 in self.fail:
            reply(writer, "429 Too Many Requests", {"error": {"message": "slow down"}})
            return
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        stream = b"".join(self.events(self.bodies[-1], "chat" in path))
        for start in range(0, len(stream), self.piece):
            piece = stream[start : start + self.piece]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if self.delay or start % (self.piece * 16) == 0:
                await writer.drain()
                await asyncio.sleep(self.delay)
        writer.write(b"0\r\n\r\n")
        self._now -= 1

    def events(self, body: dict[str, Any], chat: bool) -> Iterator[bytes]:
        count = body.get("max_completion_tokens") or body["max_tokens"]
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        yield b": a comment\r\n\r\n"
        if self.odd:
            yield self.odd
        if chat:
            yield event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for _ in range(count):
            part = {"delta": {"content": "né "}} if chat else {"text": "né "}
            yield event({"choices": [{**part, "finish_reason": None}]})
        if self.broken:
            return
        end = {"delta": {}} if chat else {"text": ""}
        yield event({"choices": [{**end, "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": count}
        yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def event(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message, ensure_ascii=False).encode() + b"\r\n\r\n"


def reply(writer: asyncio.StreamWriter, status: str, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


@contextlib.contextmanager
def fake_openai(**options: Any) -> Iterator[FakeOpenAI]:
    """Runs the server in a thread of its own."""
    fake, ready, stop = FakeOpenAI(**options), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        handlers: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            handlers.add(task)
            await fake.handle(reader, writer)
            handlers.discard(task)

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)
