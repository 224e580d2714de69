"""Servers that answer garbage, in part, or late, and lists that change in bad ways: a front goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
from pathlib import Path

import httpx
import pytest

from frame.routing.health import load_of
from frame.routing.server_list import ServerFile
from frame.settings import ConfigError
from tests.routing.fakes import CHAT, Seen, front, reply, servers, stream
from tests.routing.test_pairs import BODY, JSON, PARAMS, pairs


async def test_a_report_that_is_no_text_does_not_end_the_watch() -> None:
    assert load_of("JSON \udcff", b"") is None

    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nendpoint-load-metrics: JSON \xff\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    made = await asyncio.start_server(odd, "127.0.0.1", 0)
    async with made, front(f"127.0.0.1:{made.sockets[0].getsockname()[1]}") as f:
        await f.watch.look()
        assert f.fleet.servers[0].usable


@pytest.mark.parametrize("said", [b'{"error": {"message": "\\ud800"}}', b'{"error": {"message": "\xff"}}'])
async def test_what_a_server_says_of_its_health_can_be_shown(said: bytes) -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        port = int(server.url.rpartition(":")[2])
        await server.stop()

        async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 500 \xff\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
            writer.close()

        other = await asyncio.start_server(odd, "127.0.0.1", port)
        await f.watch.look()
        await f.watch.look()
        assert f.fleet.servers[0].problem
        assert (await f.client.get("/fleet")).json()["servers"][0]["problem"]
        other.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xfe\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX\xff: \xff\r\n\r\n",
        b"HTTP/1.1 999999 \xff\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xff\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\xff\xff\r\n",
        b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_garbage_instead_of_health_can_be_shown(said: bytes) -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        port = int(server.url.rpartition(":")[2])
        await server.stop()

        async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            writer.close()

        other = await asyncio.start_server(odd, "127.0.0.1", port)
        await f.watch.look()
        await f.watch.look()
        assert f.fleet.servers[0].problem
        assert (await f.client.get("/fleet")).json()["servers"][0]["problem"]
        other.close()


async def test_a_load_that_is_told_no_more_counts_no_more() -> None:
    async with servers(reply(200)) as (server,):
        server.load = {"server_load": 50}
        async with front(server.url) as f:
            assert f.fleet.servers[0].num_other == 50
            server.load = None
            await f.watch.look()
            assert f.fleet.servers[0].num_other == 0


async def test_a_server_that_was_away_is_asked_for_its_load_again() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        server.health = 503
        await f.watch.look()
        server.health, server.load = 200, {"server_load": 5}
        await f.watch.look()
        assert f.fleet.servers[0].num_other == 5


async def test_a_silent_server_does_not_hold_up_the_watch_over_others() -> None:
    async with (
        servers(reply(200), reply(200)) as made,
        front(*(one.url for one in made), "--health-seconds", "0.05") as f,
    ):
        port = int(made[0].url.rpartition(":")[2])
        await made[0].stop()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        other = await asyncio.start_server(handle, "127.0.0.1", port)
        watching = asyncio.create_task(f.watch.run())
        await asyncio.sleep(0.3)
        made[1].health = 503
        async with asyncio.timeout(60):
            while f.fleet.servers[1].problem is None:
                await asyncio.sleep(0.01)
        watching.cancel()
        other.close()


async def test_passwords_in_a_list_are_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "servers.txt"
    async with servers(reply(200)) as (server,):
        file.write_text(server.url)
        async with front("--servers", str(file)) as f:
            for text in ("http://user:hunter2@a:1", "http://user:hunter2@a:x", "user:hunter2@a:1"):
                file.write_text(text)
                await f.watch.look()
                assert "hunter2" not in (await f.client.get("/fleet")).text
    assert "hunter2" not in caplog.text


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    file.write_bytes(b"\xef\xbb\xbfhttp://a:1\r\nb:2\r\n")
    assert [server.url for server in ServerFile(str(file)).read()] == ["http://a:1", "http://b:2"]


def test_a_folder_in_place_of_a_list_holds_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ConfigError):
            ServerFile(str(tmp_path)).read()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_event_that_is_cut_off_does_not_spoil_the_error() -> None:
    cut = stream(b'data: {"a": 1}\n\ndata: {"a', end=False)
    async with servers(cut) as (server,), front(server.url) as f:
        answer = await f.client.post(CHAT, json={"stream": True})
        last = answer.content.split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "the server broke off its answer"


@pytest.mark.parametrize("more", ["Content-Length: 500", "Content-Encoding: gzip\r\nTransfer-Encoding: chunked"])
async def test_no_event_is_put_where_none_can_be(more: str, caplog: pytest.LogCaptureFixture) -> None:
    async def half(seen: Seen, writer: asyncio.StreamWriter) -> None:
        data = gzip.compress(b"data: 1\n\n")[:12] if "gzip" in more else b"data: 1\n\n"
        piece = b"%x\r\n%b\r\n" % (len(data), data) if "gzip" in more else data
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{more}\r\n\r\n".encode() + piece)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.transport.abort()

    async with servers(half) as (server,), front(server.url) as f:
        with pytest.raises(httpx.RemoteProtocolError):
            await f.client.post(CHAT, json={"stream": True})
    assert "Exception in ASGI" not in caplog.text


async def test_servers_that_compute_prompts_answer_without_compression() -> None:
    async def compressing(seen: Seen, writer: asyncio.StreamWriter) -> None:
        body, more = json.dumps({"kv_transfer_params": PARAMS}).encode(), {}
        if "gzip" in (seen.header("accept-encoding") or ""):
            body, more = gzip.compress(body), {"Content_Encoding": "gzip"}
        await reply(200, body, **more)(seen, writer)

    async with pairs([reply(200)], [compressing]) as ((d,), (_,), f):
        await f.client.post(CHAT, content=BODY, headers=JSON)
        assert d.seen[0].json.get("kv_transfer_params") == PARAMS
        assert d.seen[0].header("accept-encoding")


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
        b"X-A: a\rEvil: b\r\nContent-Length: 2\r\n\r\n{}",
        b"X-A: a\x00\x01\r\nContent-Length: 2\r\n\r\n{}",
        b"X A: a\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_an_answer_that_two_readers_could_read_differently_is_none(head: bytes) -> None:
    async def odd(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + head)

    async with servers(odd) as (server,), front(server.url) as f:
        assert (await f.client.get("/v1/x")).status_code == 502


async def test_an_answer_that_nobody_asked_for_reaches_nobody() -> None:
    async def twice(seen: Seen, writer: asyncio.StreamWriter) -> None:
        first, second = seen.target.encode(), b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b%b" % (len(first), first, second))

    async with servers(twice) as (server,), front(server.url) as f:
        for number in range(3):
            assert (await f.client.get(f"/v1/{number}")).text == f"/v1/{number}"
