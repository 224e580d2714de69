"""What a front does with requests and answers: nothing that either side could notice."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest

from frame.interfaces import RoutePolicy, Setup
from frame.routing.upstream import watched_socket
from tests.contract.wrong_routing import Faithful, Picky, Selfish
from tests.routing.fakes import CHAT, Seen, die, front, reply, servers, stream, turns

EVENTS = (b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\n', b"data: [DONE]\n\n")


async def test_a_request_and_its_answer_pass_as_they_are() -> None:
    odd = b'{"b" : 1.0,\n "a":"\\u00e9\xc3\xa9", "a": 12345678901234567890}  '
    async with servers(reply(201, b'{"x" : 1.50}', X_Own="1", Set_Cookie="a=b")) as (server,), front(server.url) as f:
        answer = await f.client.post(
            "/v1/thing%2Felse?q=a%20b&q=",
            content=odd,
            headers={"X-Mine": "é".encode(), "Content-Type": "application/json"},
        )
        assert (answer.status_code, answer.content) == (201, b'{"x" : 1.50}')
        assert answer.headers["x-own"] == "1"
        assert answer.headers["set-cookie"] == "a=b"
        assert len(answer.headers.get_list("date")) == 1
        (seen,) = server.seen
        assert (seen.method, seen.target, seen.body) == ("POST", "/v1/thing%2Felse?q=a%20b&q=", odd)
        assert (seen.header("x-mine") or "").encode("latin-1") == "é".encode()
        assert seen.header("host") == server.url.removeprefix("http://")
        assert [name.lower() for name, _ in seen.headers].count("content-length") == 1
        names = {name.lower() for name, _ in seen.headers}
        assert names == {"host", "accept", "accept-encoding", "user-agent", "x-mine", "content-type", "content-length"}


@pytest.mark.parametrize(
    "target",
    ["/v1/a/../b//c;x?y=%2F&&=", "/%2e%2e/%00", "//a/b", "/a%zz", "/é", "/?", "/a?b?c"],
)
async def test_a_path_passes_as_it_is(target: str) -> None:
    async with servers(reply(200)) as (server,), front(server.url, "--no-page") as f:
        reader, writer = await asyncio.open_connection(*f.url.removeprefix("http://").split(":"))
        writer.write(f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode("latin-1"))
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
        assert [seen.target for seen in server.seen] in ([target], [target.rstrip("?")], [])


def test_a_link_to_a_machine_that_has_gone_ends() -> None:
    address = socket.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)[0]
    with watched_socket(address) as made:
        idle, interval, count = (
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert idle + interval * count <= 20
        # what was sent and never acknowledged
        assert 0 < made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 20_000


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS", "PUT", "PATCH"])
async def test_methods_pass(method: str) -> None:
    async with servers(reply(200, b"" if method == "HEAD" else b"body")) as (server,), front(server.url) as f:
        answer = await f.client.request(method, "/v1/models/x")
        assert answer.status_code == 200
        assert answer.content == (b"" if method == "HEAD" else b"body")
        assert server.seen[0].method == method


@pytest.mark.parametrize("status", [204, 304, 307, 400, 404, 429, 500])
async def test_a_servers_own_status_is_an_answer(status: int) -> None:
    body = b"" if status in (204, 304) else b'{"error": "mine"}'
    async with turns(reply(status, body, Retry_After="7"), reply(200)) as (made, f):
        answer = await f.client.post(CHAT, json={})
        assert (answer.status_code, answer.content) == (status, body)
        assert answer.headers["retry-after"] == "7"
        assert [len(server.seen) for server in made] == [1, 0]


async def test_pieces_of_a_stream_are_not_held_back() -> None:
    pause = asyncio.Event()
    async with turns(stream(*EVENTS, pause=pause)) as (_, f):
        asked = f.client.build_request("POST", CHAT, json={"stream": True})
        answer = await f.client.send(asked, stream=True)
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-own"] == "yes"
        pieces = answer.aiter_raw()
        assert await anext(pieces) == EVENTS[0]  # while the server waits
        pause.set()
        assert b"".join([piece async for piece in pieces]) == b"".join(EVENTS[1:])


async def test_connections_are_used_again() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        before = server.connections
        for _ in range(20):
            assert (await f.client.post(CHAT, json={})).status_code == 200
        assert server.connections - before <= 1


async def test_a_dead_server_costs_no_request() -> None:
    async with turns(reply(200), reply(200)) as (made, f):
        await made[0].stop()
        for _ in range(6):
            assert (await f.client.post(CHAT, json={})).status_code == 200
        assert len(made[1].seen) == 6
        assert f.fleet.servers[0].problem is not None
        assert f.fleet.servers[0].failures == 1  # then it is left alone


async def test_a_server_that_breaks_off_before_its_answer_is_replaced() -> None:
    async with turns(die, reply(200, {"from": "second"})) as (made, f):
        answer = await f.client.post(CHAT, json={"n": 1})
        assert answer.json() == {"from": "second"}
        assert [len(server.seen) for server in made] == [1, 1]
        assert made[0].seen[0].body == made[1].seen[0].body


async def test_a_stream_without_a_first_event_is_begun_anew() -> None:
    async with turns(stream(end=False), stream(*EVENTS)) as (_, f):
        answer = await f.client.post(CHAT, json={"stream": True})
        assert (answer.status_code, answer.content) == (200, b"".join(EVENTS))


async def test_nothing_is_repeated_once_the_client_has_got_something(caplog: pytest.LogCaptureFixture) -> None:
    async with turns(stream(EVENTS[0], end=False), stream(*EVENTS)) as (made, f):
        answer = await f.client.post(CHAT, json={"stream": True})
        first, last = answer.content.split(b"\n\n")[:2]
        assert first + b"\n\n" == EVENTS[0]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["message"] == "the server broke off its answer"
        assert len(made[1].seen) == 0
        assert f.fleet.servers[0].broken == 1
        url = f.fleet.servers[0].url
        assert f"{url} broke off an answer: the answer ended before it was whole, or was no HTTP\n" in caplog.text


async def test_a_message_stream_that_breaks_off_ends_in_anthropics_form() -> None:
    async with servers(stream(EVENTS[0], end=False)) as (server,), front(server.url) as f:
        answer = await f.client.post("/v1/messages", json={"stream": True})
        assert b"event: error\ndata: " in answer.content
        assert json.loads(answer.content.rpartition(b"data: ")[2])["type"] == "error"


async def test_an_answer_that_breaks_off_ends_with_the_connection() -> None:
    async def half(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.transport.abort()

    async with servers(half) as (server,), front(server.url) as f:
        with pytest.raises(httpx.RemoteProtocolError):
            await f.client.post(CHAT, json={})


async def test_503_is_an_answer_only_where_no_other_server_is() -> None:
    async with turns(reply(503, b"full", Retry_After="9"), reply(200)) as (made, f):
        assert (await f.client.post(CHAT, json={})).status_code == 200
        made[1].behave = reply(503, b"full too")
        answer = await f.client.post(CHAT, json={})
        assert (answer.status_code, answer.content) == (503, b"full too")  # of the one that was asked last
        assert [len(server.seen) for server in made] == [2, 2]


async def test_one_server_that_closes_an_idle_connection_is_asked_again() -> None:
    calls = 0

    async def once(seen: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        await (die if calls == 1 else reply(200))(seen, writer)

    async with servers(once) as (server,), front(server.url) as f:
        assert (await f.client.post(CHAT, json={})).status_code == 200


async def test_tries_are_bounded_and_the_error_names_no_server() -> None:
    async with turns(die, die, die, die, retries=1) as (made, f):
        answer = await f.client.post(CHAT, json={})
        assert answer.status_code == 502
        assert answer.json()["error"]["message"] == "no server has answered the request"
        assert sum(len(server.seen) for server in made) == 2


async def test_a_request_by_which_servers_die_does_not_end_all_of_them() -> None:
    async with turns(die, die, die, reply(200), retries=9) as (made, f):
        assert (await f.client.post(CHAT, json={})).status_code == 502
        assert sum(len(server.seen) for server in made) == 2


@pytest.mark.parametrize("policy", [Faithful, Picky, Selfish])
async def test_a_policy_that_is_wrong_fails_no_request(policy: type[RoutePolicy]) -> None:
    async with servers(reply(200), reply(200)) as made, front(*(one.url for one in made), policy=policy(Setup())) as f:
        for number in range(4):
            if number == 2:
                await made[0].stop()
            assert (await f.client.post(CHAT, content=b"[1]")).status_code == 200
        assert made[1].seen


async def test_what_may_be_done_once_only_is_not_repeated() -> None:
    async with turns(die, reply(200)) as (made, f):
        assert (await f.client.post("/v1/batches", json={})).status_code == 502
        assert len(made[1].seen) == 0


async def test_a_thing_that_one_server_keeps_is_found() -> None:
    async with turns(reply(404), reply(200, {"id": "resp_1"})) as (made, f):
        for _ in range(3):
            assert (await f.client.get("/v1/responses/resp_1")).json() == {"id": "resp_1"}
        assert (await f.client.get("/v1/models/x")).status_code in (200, 404)
        made[1].behave = reply(404)
        assert (await f.client.get("/v1/responses/resp_1")).status_code == 404


async def test_a_client_that_leaves_ends_the_servers_work() -> None:
    came = asyncio.Event()

    async def never(seen: Seen, writer: asyncio.StreamWriter) -> None:
        came.set()
        await asyncio.Event().wait()

    async with servers(never) as (server,), front(server.url) as f:
        asking = asyncio.create_task(f.client.post(CHAT, json={}))
        async with asyncio.timeout(60):
            await came.wait()
            asking.cancel()
            await server.left.wait()
        await _idle(f.fleet.servers[0])


async def test_a_client_that_leaves_a_stream_ends_the_servers_work() -> None:
    async with servers(stream(*EVENTS, pause=asyncio.Event())) as (server,), front(server.url) as f:
        async with f.client.stream("POST", CHAT, json={"stream": True}) as answer:
            assert await anext(answer.aiter_raw()) == EVENTS[0]
            assert f.fleet.servers[0].in_flight == 1
        async with asyncio.timeout(60):
            await server.left.wait()
        await _idle(f.fleet.servers[0])


async def _idle(server: object) -> None:
    async with asyncio.timeout(60):
        while server.in_flight:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)


async def test_files_pass_piece_by_piece() -> None:
    async with servers(reply(200, {"id": "file"})) as (server,), front(server.url) as f:
        data = b"x" * 300_000
        answer = await f.client.post("/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"})
        assert answer.json() == {"id": "file"}
        assert data in server.seen[0].body
        assert server.seen[0].header("content-length") == str(len(server.seen[0].body))


async def test_files_go_to_another_server_only_where_the_first_is_not_there() -> None:
    files = {"file": ("a.jsonl", b"x" * 300_000)}
    async with turns(reply(503, b"full"), reply(200, {"id": "file"})) as (made, f):
        assert (await f.client.post("/v1/files", files=files)).status_code == 503
        assert made[1].seen == []
        await made[0].stop()
        for _ in range(2):
            answer = await f.client.post("/v1/files", files=files)
            assert (answer.status_code, answer.json()) == (200, {"id": "file"})
            assert b"x" * 300_000 in made[1].seen[-1].body


async def test_large_bodies_and_answers_pass() -> None:
    data = bytes(range(256)) * 16_384  # 4 MiB
    async with servers(reply(200, data)) as (server,), front(server.url) as f:
        answer = await f.client.post(CHAT, content=data)
        assert answer.content == data == server.seen[0].body


async def test_a_hundred_streams_at_once() -> None:
    async with servers(stream(*EVENTS), stream(*EVENTS)) as made, front(*(each.url for each in made)) as f:
        answers = await asyncio.gather(*(f.client.post(CHAT, json={"i": i, "stream": True}) for i in range(100)))
        assert {answer.content for answer in answers} == {b"".join(EVENTS)}
        counts = [len(server.seen) for server in made]
        assert sum(counts) == 100
        assert min(counts) > 30
        assert all(server.in_flight == 0 for server in f.fleet.servers)


async def test_a_client_that_does_not_read_holds_the_server_back() -> None:
    sent = 0

    async def endless(seen: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        while sent < 128 << 20:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536

    async with servers(endless) as (server,), front(server.url) as f:
        _, writer = await asyncio.open_connection(*f.url.removeprefix("http://").split(":"), limit=1024)
        writer.write(b"GET /v1/x HTTP/1.1\r\nHost: a\r\n\r\n")
        before = -1
        async with asyncio.timeout(60):
            while sent != before or not sent:
                before = sent
                await asyncio.sleep(0.3)
        assert sent < 32 << 20
        writer.transport.abort()
        await _idle(f.fleet.servers[0])
