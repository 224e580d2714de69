"""Frames of a stream on their way into a connection: chunks, and what happens when the client lags or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from frame.core.server.event_stream import EventStream, attach_wire


class Connection:
    """As much of uvicorn's protocol, flow control and cycle as a wire uses."""

    def __init__(self, method: str = "POST") -> None:
        self.scope: dict[str, Any] = {"type": "http", "method": method}
        self.chunked_encoding: bool | None = None
        self.disconnected = False
        self.flow = self.transport = self
        self.write_paused = False
        self.resumed = asyncio.Event()
        self.written: list[bytes] = []
        self.messages: list[dict[str, Any]] = []
        attach_wire(self)

    def write(self, data: bytes) -> None:
        self.written.append(data)

    async def drain(self) -> None:
        await self.resumed.wait()

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise RuntimeError("unreachable")

    async def send(self, message: dict[str, Any]) -> None:
        self.chunked_encoding = True
        self.messages.append(message)


async def numbers(taken: list[int], count: int = 5) -> AsyncGenerator[bytes, None]:
    for number in range(count):
        taken.append(number)
        yield b"data: %d\n\n" % number


async def test_all_but_the_first_frame_are_chunks_in_the_connection() -> None:
    connection = Connection()
    await EventStream(numbers([]))(connection.scope, connection.receive, connection.send)
    assert b"".join(connection.written) == b"".join(b"9\r\ndata: %d\n\n\r\n" % number for number in range(1, 5))
    bodies = [message["body"] for message in connection.messages if message["type"] == "http.response.body"]
    assert bodies == [b"data: 0\n\n", b""]
    assert connection.messages[-1]["more_body"] is False


async def test_a_frame_is_asked_for_only_when_the_client_keeps_up() -> None:
    connection, taken = Connection(), list[int]()
    connection.write_paused = True
    task = asyncio.create_task(EventStream(numbers(taken))(connection.scope, connection.receive, connection.send))
    while len(taken) < 2:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert taken == [0, 1]
    connection.write_paused = False
    connection.resumed.set()
    await task
    assert len(connection.written) == 4


async def test_nothing_is_written_to_a_client_that_has_left() -> None:
    connection = Connection()
    connection.disconnected = True
    await EventStream(numbers([]))(connection.scope, connection.receive, connection.send)
    assert connection.written == []


@pytest.mark.parametrize("method", ["HEAD", None])
async def test_without_chunks_or_a_connection_frames_are_messages(method: str | None) -> None:
    connection = Connection(method or "POST")
    scope = connection.scope if method else {"type": "http", "method": "POST"}
    await EventStream(numbers([]))(scope, connection.receive, connection.send)
    assert connection.written == []
    bodies = [message["body"] for message in connection.messages if message["type"] == "http.response.body"]
    assert bodies == [*(b"data: %d\n\n" % number for number in range(5)), b""]
