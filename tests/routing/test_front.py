"""What a front answers itself: health, metrics, the fleet and its page, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from frame.routing import page
from tests.routing.fakes import CHAT, Seen, front, reply, servers, stream, turns

KEY = {"Authorization": "Bearer secret"}
FOLDER = Path(page.__file__).with_name("static")
OWN = ["/", "/fleet/style.css", "/fleet/fleet.js"]


async def test_every_route_but_health_and_the_page_needs_the_key() -> None:
    async with servers(reply(200)) as (server,), front(server.url, "--api-key", "secret", "other") as f:
        for path in ("/health", "/live", "/ready", "/ping", *OWN):
            assert (await f.client.get(path)).status_code == 200, path
        for path in ("/fleet", "/metrics", "/v1/models", CHAT, "//health", "/%68ealth", "/health/", "/health/../v1"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "secre"}, {"Host": "health"}):
                answer = await f.client.get(f.url + path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
        for method in ("POST", "PUT", "DELETE"):
            for path in ("/health", "/", CHAT):
                assert (await f.client.request(method, path)).status_code == 401
        assert server.seen == []
        for headers in (KEY, {"x-api-key": "other"}):
            assert (await f.client.get("/v1/models", headers=headers)).status_code == 200
        assert (await f.client.options(CHAT)).status_code == 200  # a browser's question carries no key
        assert "secret" not in (await f.client.get("/fleet", headers=KEY)).text


async def test_keys_of_clients_go_on_unless_servers_have_their_own() -> None:
    async with servers(reply(200)) as (server,), front(server.url, "--api-key", "secret") as f:
        await f.client.get("/v1/models", headers={"x-api-key": "secret"})
        assert server.seen[-1].header("x-api-key") == "secret"
    async with (
        servers(reply(200)) as (server,),
        front(server.url, "--api-key", "secret", "--server-key", "inner") as f,
    ):
        for headers in (KEY, {"x-api-key": "secret"}):
            await f.client.get("/v1/models", headers=headers)
            assert server.seen[-1].header("authorization") == "Bearer inner"
            assert "secret" not in str(server.seen[-1].headers)
        assert {seen.header("authorization") for seen in server.asked} == {"Bearer inner"}


async def test_bodies_are_bounded_while_they_are_read() -> None:
    async with servers(reply(200)) as (server,), front(server.url, "--max-body-bytes", "2000") as f:
        assert (await f.client.post(CHAT, content=b"x" * 2000)).status_code == 200

        async def pieces() -> Iterator[bytes]:
            for _ in range(5):
                yield b"x" * 500

        for content in (b"x" * 2001, pieces()):
            answer = await f.client.post(CHAT, content=content)
            assert answer.status_code == 413
            assert "--max-body-bytes" in answer.json()["error"]["message"]
        assert len(server.seen) == 1


async def test_files_are_bounded_while_they_are_sent_on() -> None:
    async with servers(reply(200)) as (server,), front(server.url, "--max-upload-bytes", "2000") as f:
        form = {"Content-Type": "multipart/form-data; boundary=x"}

        async def pieces() -> Iterator[bytes]:
            for _ in range(50):
                yield b"x" * 500

        for content in (b"x" * 2001, pieces()):
            answer = await f.client.post("/v1/files", content=content, headers=form)
            assert answer.status_code == 413
            assert "--max-upload-bytes" in answer.json()["error"]["message"]
        assert f.fleet.servers[0].in_flight == 0
        assert server.seen == []


async def test_heads_are_bounded() -> None:
    async with servers(reply(200)) as (server,), front(server.url, "--max-headers", "20") as f:
        answer = await f.client.get("/v1/models", headers=[(f"x-{number}", "1") for number in range(20)])
        assert answer.status_code == 431
        reader, writer = await asyncio.open_connection(*f.url.removeprefix("http://").split(":"))
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000)
        with contextlib.suppress(ConnectionResetError):
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        assert server.seen == []


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://127.0.0.1:1/v1/models HTTP/1.1\r\nHost: evil",
        b"GET //127.0.0.1:1/v1/models HTTP/1.1\r\nHost: evil",
        b"GET /@127.0.0.1:1/ HTTP/1.1\r\nHost: evil@127.0.0.1:1",
        b"GET /\\..\\..//x HTTP/1.1\r\nHost: a\r\nX-Forwarded-Host: 127.0.0.1:1",
        b"POST /v1/x HTTP/1.1\r\nHost: a\r\nConnection: close, x-mine\r\nX-Mine: 1\r\nContent-Length: 0",
        b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked",
    ],
)
async def test_no_request_reaches_anything_but_a_listed_server(head: bytes) -> None:
    async with servers(reply(200, {"from": "listed"})) as (server,), front(server.url) as f:
        reader, writer = await asyncio.open_connection(*f.url.removeprefix("http://").split(":"))
        body = b"2\r\n{}\r\n0\r\n\r\n" if b"chunked" in head else b""
        writer.write(head + b"\r\n\r\n" + body)
        async with asyncio.timeout(60):
            answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
        for seen in server.seen:
            assert seen.header("host") == server.url.removeprefix("http://")
            assert seen.header("x-mine") is None
            assert [name.lower() for name, _ in seen.headers].count("content-length") <= 1


async def test_a_head_that_is_no_text_is_refused() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        answer = await f.client.get("/v1/models", headers={"x-mine": b"\xff\xfe"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "a header of the request is no UTF-8 text"
        assert server.seen == []


async def test_errors_have_the_form_of_the_route() -> None:
    async with servers(reply(200)) as (server,), front(server.url, "--api-key", "secret") as f:
        error = (await f.client.post("/v1/messages", json={})).json()
        assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")
        assert (await f.client.post(CHAT, json={})).json()["error"]["code"] == "invalid_api_key"


async def test_without_a_ready_server_nothing_is_served() -> None:
    async with servers(reply(200), reply(200)) as made:
        made[0].health = made[1].health = 503
        async with front(*(server.url for server in made)) as f:
            for path in ("/health", "/v1/models"):
                answer = await f.client.get(path)
                assert answer.status_code == 503
                assert answer.json()["error"]["message"] == "none of 2 servers is ready"
                assert "retry-after" in answer.headers
            assert (await f.client.get("/live")).status_code == 200
            made[1].health = 200
            await f.watch.look()
            assert (await f.client.get("/health")).status_code == 200
            assert (await f.client.get("/v1/models")).status_code == 200
            assert [len(server.seen) for server in made] == [0, 1]


async def test_while_it_stops_it_ends_what_it_has() -> None:
    pause = asyncio.Event()
    async with turns(stream(b"data: 1\n\n", b"data: 2\n\n", pause=pause)) as (_, f):
        asked = f.client.build_request("POST", CHAT, json={})
        answer = await f.client.send(asked, stream=True)
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"data: 1\n\n"
        f.front.draining = True
        refused = await f.client.post(CHAT, json={})
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the front is stopping")
        assert (await f.client.get("/health")).status_code == 503
        assert f.forwarding.active == 1
        pause.set()
        assert b"".join([piece async for piece in pieces]) == b"data: 2\n\n"


async def test_when_it_waits_no_longer_it_says_so() -> None:
    async def never(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with turns(stream(b"data: 1\n\n", b"", pause=asyncio.Event()), never) as (made, f):
        answers = [asyncio.create_task(f.client.post(path, json={})) for path in (CHAT, "/v1/messages")]
        async with asyncio.timeout(60):
            while not all(server.seen for server in made):
                await asyncio.sleep(0.01)
            while f.fleet.servers[0].answers[1] == 0:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        f.forwarding.stop()
        first, second = await asyncio.gather(*answers)
        assert first.content.startswith(b"data: 1\n\ndata: ")
        assert "the front was stopped" in json.loads(first.content.rpartition(b"data: ")[2])["error"]["message"]
        assert second.status_code == 503
        assert second.json()["error"]["type"] == "overloaded_error"
        assert f.forwarding.active == 0


async def test_metrics_tell_what_happened() -> None:
    async with turns(reply(200), reply(429)) as (made, f):
        for _ in range(4):
            await f.client.post(CHAT, json={})
        await made[1].stop()
        await f.client.post(CHAT, json={})
        await f.client.post(CHAT, json={})
        await f.client.get("/v1/models", headers={"x-mine": b"\xff"})
        text = (await f.client.get("/metrics")).text
        first, second = (server.url for server in made)

        def value(name: str, **labels: str) -> float:
            listed = ",".join(f'{key}="{value}"' for key, value in labels.items())
            match = re.search(rf"^{name}\{{{re.escape(listed)}\}} (\S+)$", text, re.MULTILINE)
            assert match is not None, text
            return float(match.group(1))

        assert value("frame_route_answers_total", server=first, status="2xx") == 4
        assert value("frame_route_answers_total", server=second, status="4xx") == 2
        assert value("frame_route_failures_total", server=second) == 1
        assert value("frame_route_ready", server=first) == 1
        assert value("frame_route_ready", server=second) == 0
        assert value("frame_route_requests_in_flight", server=first) == 0
        assert value("frame_route_head_seconds_bucket", le="+Inf", server=first) == 4
        assert value("frame_route_refused_total", status="400") == 1


async def test_the_fleet_is_shown() -> None:
    async with servers(reply(200), reply(200)) as made:
        made[0].load = {"server_load": 5}
        async with front(made[0].url, "--prefill", made[1].url, "--policy", "pairs") as f:
            await made[1].stop()
            await f.watch.look()
            fleet = (await f.client.get("/fleet")).json()
            assert (fleet["policy"], fleet["problem"], fleet["draining"]) == ("pairs", None, False)
            first, second = fleet["servers"]
            assert (first["url"], first["role"], first["state"], first["other"]) == (made[0].url, "serve", "ready", 5)
            assert (second["role"], second["state"], second["problem"]) == (
                "prefill",
                "unready",
                "Connection refused",
            )


@pytest.mark.parametrize("path", OWN)
async def test_files_of_the_page_may_load_nothing_from_elsewhere(path: str) -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        answer = await f.client.get(path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        again = await f.client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await f.client.head(path)).content == b""
    async with servers(reply(404)) as (server,), front(server.url, "--no-page") as f:
        assert (await f.client.get(path)).status_code == 404


def test_the_page_holds_no_inline_code_and_no_foreign_address() -> None:
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"\son\w+=|style=|<script(?![^>]*\ssrc=)|<style", html)
    for file in FOLDER.iterdir():
        assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"^\s*//.*", "", file.read_text(), flags=re.M)), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", file.read_text())


def test_the_page_reads_what_the_fleet_says() -> None:
    script = (FOLDER / "fleet.js").read_text()
    for name in set(re.findall(r"\bserver\.(\w+)", script)):
        assert name in (
            "url", "role", "state", "problem", "in_flight", "other", "kv_usage", "answers", "failures", "broken",
        )  # fmt: skip
    ids = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert ids == set(re.findall(r'\bid="([\w-]+)"', (FOLDER / "index.html").read_text()))


async def test_json_of_refusals_is_whole() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        answer = await f.client.post("/metrics")
        assert answer.status_code == 405
        assert json.loads(answer.content)["error"]["message"].startswith("method POST is not allowed")
        assert isinstance(answer, httpx.Response)
