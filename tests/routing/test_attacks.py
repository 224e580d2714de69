"""What hostile clients must not get a front to do."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from frame.interfaces import RouteRequest
from tests.routing.fakes import CHAT, Fronted, Seen, front, reply, servers

FORM = b"Content-Type: multipart/form-data; boundary=x\r\n"


async def spoken(f: Fronted, *pieces: bytes, seconds: float = 10) -> bytes:
    """All that the front answers to these bytes until it closes or is silent."""
    reader, writer = await asyncio.open_connection(*f.url.removeprefix("http://").split(":"))
    found = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(seconds):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.05)
            while data := await reader.read(65536):
                found += data
    writer.transport.abort()
    return found


async def test_a_length_with_many_zeros_is_that_length() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        head = b"POST /v1/files HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + FORM
        await spoken(f, head + b"Content-Length: " + b"0" * 30 + b"5\r\n\r\nhello")
        for seen in server.seen:
            assert (seen.header("content-length"), seen.body) == ("5", b"hello")


async def test_a_trailer_is_no_header() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        head = b"POST /v1/files HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n" + FORM
        inner = b"abcGET /admin HTTP/1.1\r\nHost: a\r\n\r\n"
        body = b"%x\r\n%b\r\n0\r\nContent-Length: 3\r\nX-Late: 1\r\n\r\n" % (len(inner), inner)
        answer = await spoken(f, head + b"\r\n" + body, seconds=1)
        assert b" 200 " in answer or b" 400 " in answer
        for seen in server.seen:
            assert seen.body == inner
            assert seen.header("content-length") is None


_POST, _END = b"POST /v1/x HTTP/1.1\r\nHost: a\r\n", b"\r\n\r\n"


@pytest.mark.some(6)
@pytest.mark.parametrize(
    "request_",
    [
        _POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/y HTTP/1.1\r\n\r\n",
        _POST + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabcde",
        _POST + b"Content-Length: +3\r\n\r\nabc",
        _POST + b"Content-Length : 3\r\n\r\nabc",
        _POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        _POST + b"Transfer-Encoding: chunked\r\n\r\n2;a=\r\nx\r\n{}\r\n0\r\n\r\n",
        _POST + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n",
        _POST.replace(b"\r", b"") + b"Content-Length: 3\n\nabc",
        _POST + b"X-A: b\rX-Evil: c" + _END,
        _POST + b"X-A: b\r\n X-Evil: c" + _END,
        _POST + b"X-A: b\x00c" + _END,
        b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: a" + _END,
        b"GET http://127.0.0.1:1 HTTP/1.1\r\nHost: a" + _END,
        b"OPTIONS * HTTP/1.1\r\nHost: a" + _END,
        b"GET ?x HTTP/1.1\r\nHost: a" + _END,
        b"PRI * HTTP/2.0\r\n\r\nSM" + _END,
    ],
)
async def test_what_two_readers_could_read_differently_reaches_no_server(request_: bytes) -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        answer = await spoken(f, request_, seconds=0.3)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert server.seen == []


@pytest.mark.parametrize(
    ("request_", "targets"),
    [
        (_POST + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\n\r\n", ["/v1/x"]),
        (_POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}", ["/v1/x"]),
        (_POST + b"Content-Length: 2\r\n\r\n{}GET /v1/y HTTP/1.0\r\n\r\n", ["/v1/x", "/v1/y"]),
    ],
)
async def test_what_is_sent_on_has_one_length_and_no_hop_by_hop_header(request_: bytes, targets: list[str]) -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        answer = await spoken(f, request_, seconds=0.3)
        assert answer.count(b" 200 OK") == len(targets) == len(server.seen)
        assert [seen.target for seen in server.seen] == targets
        assert server.seen[0].body == b"{}"
        names = [name.lower() for name, _ in server.seen[0].headers]
        assert sorted(names) == ["content-length", "host"]


_UPGRADE = b"Connection: upgrade\r\nUpgrade: h2c\r\n"
_INNER = b"GET /v1/inner HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    "head", [_POST + _UPGRADE + b"Content-Length: %d" % len(_INNER), _POST + _UPGRADE + b"Transfer-Encoding: chunked"]
)
@pytest.mark.parametrize("cut", [0, 10, len(_INNER)])
async def test_a_body_after_an_upgrade_is_no_request(head: bytes, cut: int) -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        answer = await spoken(f, head + _END + _INNER[:cut], _INNER[cut:], seconds=0.3)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert server.seen == []


async def test_nothing_follows_an_upgrade_on_its_connection() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        head = b"GET /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n" + _UPGRADE
        answer = await spoken(f, head + b"\r\nGET /v1/a?", _INNER, seconds=0.3)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        assert [seen.target for seen in server.seen] == ["/v1/x"]


def test_a_body_of_very_many_parts_is_not_read_for_the_policy() -> None:
    assert RouteRequest(CHAT, b'{"a": [' + b"[]," * 1000 + b"0]}").content is not None
    assert RouteRequest(CHAT, b'{"a": [' + b"[]," * 200_000 + b"0]}").content is None
    assert RouteRequest(CHAT, b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}").content is None


async def test_without_a_key_no_body_is_read() -> None:
    async with servers(reply(200)) as (server,), front(server.url, "--api-key", "secret", "--server-key", "inner") as f:
        for headers in ({}, {"Content-Type": "multipart/form-data; boundary=x"}):
            answer = await f.client.request("OPTIONS", CHAT, content=b"x" * 1000, headers=headers)
            assert answer.status_code == 401
        assert server.seen == []


async def test_own_routes_written_otherwise_do_not_reach_those_of_servers() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        for path in ("/%6detrics", "/metric%73", "/%68ealth", "/%66leet"):
            answer = await f.client.get(f.url + path)
            assert answer.status_code == 404, path
        assert server.seen == []


@pytest.mark.parametrize(
    "path", ["/../admin", "/v1/../../admin", "/%2e%2e/admin", "/.%2E/admin", "/..%2fadmin", "/v1/..", "/..%5cadmin"]
)
async def test_no_path_leaves_that_of_an_address(path: str) -> None:
    async with servers(reply(200)) as (server,), front(f"{server.url}/base") as f:
        before = len(server.seen)
        answer = await spoken(f, f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert len(server.seen) == before


async def test_a_client_that_leaves_once_its_files_are_sent_ends_the_servers_work() -> None:
    came = asyncio.Event()

    async def never(seen: Seen, writer: asyncio.StreamWriter) -> None:
        came.set()
        await asyncio.Event().wait()

    async with servers(never) as (server,), front(server.url) as f:
        asking = asyncio.create_task(f.client.post("/v1/audio/transcriptions", files={"file": ("a", b"x")}))
        async with asyncio.timeout(60):
            await came.wait()
            asking.cancel()
            await server.left.wait()


async def test_an_answer_before_the_end_of_an_upload_spoils_no_connection() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        port = int(server.url.rpartition(":")[2])
        await server.stop()
        heads: list[bytes] = []

        async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            rest = await reader.readuntil(b"\r\n\r\n")
            heads.append(rest)
            writer.write(b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\n{}")
            while data := await reader.read(65536):
                heads[-1] += data
                if b"GET " in data:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()

        other = await asyncio.start_server(early, "127.0.0.1", port)
        reader, writer = await asyncio.open_connection(*f.url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n" + FORM + b"\r\nabc")
        answer = await reader.readuntil(b"\r\n\r\n{}")
        assert b"403" in answer
        await f.client.get("/v1/x")
        assert not any(b"POST" in head and b"GET /v1/x" in head for head in heads)
        writer.transport.abort()
        other.close()


async def test_a_server_that_shows_what_it_got_does_not_show_its_key() -> None:
    async def trace(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await reply(200, repr(seen.headers).encode())(seen, writer)

    async with servers(trace) as (server,), front(server.url, "--server-key", "inner") as f:
        answer = await f.client.request("TRACE", "/v1/x")
        assert "inner" not in answer.text
        assert answer.status_code == 405
        assert server.seen == []
