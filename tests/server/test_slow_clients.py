"""Clients that send slowly or hold a place: each is cut off in its time, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from frame.core.config.server import ServerConfig
from frame.core.server import bodies, http
from frame.core.server.bodies import JSON_BODY
from frame.core.server.http import make_server
from frame.core.server.ingress import Ingress, respond


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(bodies, "PIECE_SECONDS", 0.3)
    monkeypatch.setattr(bodies, "BODY_SECONDS", 1.0)


async def application(scope: Any, receive: Any, send: Any) -> None:
    await respond(send, 200, json.dumps(scope.get(JSON_BODY)).encode())


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    app = Ingress(application, ServerConfig(max_body_bytes=100_000), lambda: None)
    server = make_server(app, ServerConfig(log_level="error"))
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


async def talk(port: int, pieces: list[bytes], pause: float) -> bytes:
    """What the server says to one who sends these pieces with pauses, until it hangs up."""
    loop, answer = asyncio.get_running_loop(), b""
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))

        async def send() -> None:
            with contextlib.suppress(OSError):
                for piece in pieces:
                    await loop.sock_sendall(client, piece)
                    await asyncio.sleep(pause)

        sending = asyncio.create_task(send())
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                while data := await loop.sock_recv(client, 65536):
                    answer += data
        sending.cancel()
    return answer


GET = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "pieces",
    [[b"GET"], [b"G"] * 50, [b"GET /x HTTP/1.1\r\n", *[b"a: b\r\n"] * 50], [b""], [GET, *[b"G"] * 50]],
    ids=["begun", "trickled", "headers", "nothing", "second request"],
)
async def test_a_head_that_does_not_end_is_cut_off(pieces: list[bytes]) -> None:
    async with serving() as port:
        answer, honest = await asyncio.gather(talk(port, pieces, 0.05), talk(port, [GET, b"G"], 0))
        assert honest.startswith(b"HTTP/1.1 200")
        assert answer.startswith(b"HTTP/1.1 200") == (pieces[0] == GET)
        assert answer.count(b"HTTP/1.1") <= 2


@pytest.mark.parametrize(
    ("body", "pause"),
    [([b'{"a":'], 0.0), ([b" "] * 60, 0.05)],
    ids=["no more", "trickled"],
)
async def test_a_body_that_does_not_come_is_answered_408(body: list[bytes], pause: float) -> None:
    async with serving() as port:
        answer = await talk(port, [POST + b"content-length: 1000\r\n\r\n", *body], pause)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer
        assert b"body" in answer


@pytest.mark.some(5)
@pytest.mark.parametrize(
    "request_",
    [
        POST + b"content-length: 2\r\ncontent-length: 30\r\n\r\n{}",
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
        POST + b"transfer-encoding: chunked, identity\r\n\r\n{}",
        POST + b"content-length: -1\r\n\r\n{}",
        POST + b"content-length: 0x2\r\n\r\n{}",
        POST + b"content-length: 99999999999999999999999\r\n\r\n{}",
        POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}",
        POST + b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n",
        b"GET /x HTTP/1.1\r\nhost: x\r\nx y: z\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: x\r\nx\x00: z\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost : x\r\n\r\n",
        b"GET /" + b"x" * 600_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /x HTTP/1.1\r\n" + b"".join(b"h%d: 1\r\n" % number for number in range(400)) + b"\r\n",
        b"GET /x HTTP/1.1\r\nx: " + b"y" * 600_000 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=lambda value: value[:24].decode("latin-1") + str(len(value)),
)
async def test_heads_that_servers_read_differently_are_refused(request_: bytes) -> None:
    async with serving() as port:
        answer = await talk(port, [request_], 0)
        statuses = [line.split()[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
        assert len(statuses) <= 1, answer
        assert all(status[:1] == b"4" for status in statuses), answer
        assert (await talk(port, [GET, b"G"], 0)).startswith(b"HTTP/1.1 200")
