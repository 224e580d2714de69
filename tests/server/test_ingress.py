from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from frame.core.config.server import ServerConfig
from frame.core.server.bodies import JSON_BODY, MAX_DEPTH, BodyParser, parse_json
from frame.core.server.ingress import Ingress, respond
from frame.core.server.keys import KeyLimits, KeyRing
from frame.interfaces import RequestError


class Recorder:
    """An application that answers with what reached it."""

    def __init__(self) -> None:
        self.calls = 0
        self.problem: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        message = await receive() if scope["method"] == "POST" else {"body": b""}
        answer = {"json": scope.get(JSON_BODY), "size": len(message["body"]), "path": scope["path"]}
        await respond(send, 200, json.dumps(answer).encode())


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def ingress_of(recorder: Recorder, keys: tuple[str, ...] = (), limits: KeyLimits | None = None, **more: Any) -> Ingress:
    server = ServerConfig(api_key=list(keys), max_body_bytes=10_000, **more)
    return Ingress(recorder, server, lambda: recorder.problem, limits=limits)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def open_client(recorder: Recorder) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(ingress_of(recorder)) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "one"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "one"}, 200),
        ({"Authorization": "Bearer two"}, 200),
        ({"authorization": "bearer one"}, 200),
        ({"Authorization": "Bearer wrong", "x-api-key": "two"}, 200),
    ],
)
async def test_keys(recorder: Recorder, headers: dict[str, str], status: int) -> None:
    async with client_of(ingress_of(recorder, ("one", "two"))) as client:
        for path in ("/v1/models", "/tokenize", "/metrics", "/nothing", "/healthy", "/health/", "/x/health"):
            response = await client.get(path, headers=headers)
            assert response.status_code == status
            if status == 401:
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
    assert recorder.calls == (7 if status == 200 else 0)


@pytest.mark.parametrize("key", ["key", "wrong"])
async def test_a_body_is_not_kept_when_it_is_answered(recorder: Recorder, key: str) -> None:
    scopes: list[Any] = []
    ingress = ingress_of(recorder, ("key",))

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await ingress(scope, receive, send)

    async with client_of(noting) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-api-key": key})
    assert answer.status_code == (200 if key == "key" else 401)
    assert [JSON_BODY in scope for scope in scopes] == [False]


@pytest.mark.parametrize(
    "path", ["//health", "/%68ealth", "/health%2f..%2fv1/models", "/v1/../health", "/health%00", "/HEALTH", "/./health"]
)
async def test_forged_paths_need_the_key(recorder: Recorder, path: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    import urllib.parse

    for host in (b"server", b"server/health", b"evil.example"):
        scope = {
            "type": "http", "method": "GET", "path": urllib.parse.unquote(path), "raw_path": path.encode(),
            "headers": [(b"host", host), (b"x-forwarded-prefix", b"/health")],
        }  # fmt: skip
        await ingress_of(recorder, ("key",))(scope, receive, send)
    assert [message["status"] for message in sent if "status" in message] == [401, 401, 401]


async def test_a_client_that_leaves_while_it_sends_costs_its_key_nothing() -> None:
    limits = KeyLimits(ServerConfig(api_key=["key"], max_requests_per_minute=60))
    before = list(limits._cells[0])

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        del message

    headers = [(b"authorization", b"Bearer key"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/x", "raw_path": b"/x", "headers": headers}
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["type"])

    ingress = Ingress(app, ServerConfig(api_key=["key"]), lambda: None, limits=limits)
    await ingress(scope, receive, send)
    assert (seen, list(limits._cells[0])) == (["http.disconnect"], before)


async def test_health_and_preflight_are_open(recorder: Recorder) -> None:
    async with client_of(ingress_of(recorder, ("key",))) as client:
        for path in ("/health", "/ping"):
            assert (await client.get(path)).status_code == 200
        assert (await client.options("/v1/models")).status_code == 200


async def test_an_absent_engine_answers_503(recorder: Recorder) -> None:
    recorder.problem = "the engine is starting"
    async with client_of(ingress_of(recorder)) as client:
        response = await client.get("/v1/models")
        assert response.status_code == 503
        assert error_of(response)["message"] == "the engine is starting"
        assert (await client.get("/health")).status_code == 200  # the route itself says what is wrong


def post(client: httpx.AsyncClient, body: bytes, kind: str = "application/json") -> Any:
    return client.post("/x", content=body, headers={"Content-Type": kind})


async def test_json_reaches_the_route(open_client: httpx.AsyncClient) -> None:
    response = await post(open_client, b'{"a": [1, 2.5, "x"]}')
    assert response.json() == {"json": {"a": [1, 2.5, "x"]}, "size": 20, "path": "/x"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a": ', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": -Infinity}', "not valid JSON"),
        (b'{"a": 1e999}', "not valid JSON"),
        (b'{"a": "\xff\xfe"}', "not UTF-8"),
        (b"\x80\x04\x95", "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b"{} {}", "not valid JSON"),
        (b"[" * 100_0 + b"]" * 100_0, "nests deeper"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nests deeper"),
    ],
)
async def test_bad_bodies_get_400(open_client: httpx.AsyncClient, body: bytes, words: str) -> None:
    response = await post(open_client, body)
    assert response.status_code == 400
    error = error_of(response)
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_other_types_get_415(open_client: httpx.AsyncClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/octet-stream"):
        assert (await post(open_client, b"{}", kind)).status_code == 415
    assert (await post(open_client, b"{}", "application/json; charset=utf-8")).status_code == 200


async def test_long_bodies_get_413(recorder: Recorder, open_client: httpx.AsyncClient) -> None:
    assert (await post(open_client, b'"' + b"x" * 10_000 + b'"')).status_code == 413

    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1000
            yield b" " * 1000

    response = await open_client.post("/x", content=chunks(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert recorder.calls == 0


async def test_too_many_headers_get_431(open_client: httpx.AsyncClient) -> None:
    response = await open_client.get("/x", headers={f"x-{number}": "1" for number in range(300)})
    assert response.status_code == 431


async def test_request_ids(recorder: Recorder) -> None:
    async with client_of(ingress_of(recorder, enable_request_id_headers=True)) as client:
        assert (await client.get("/x", headers={"X-Request-Id": "abc"})).headers["x-request-id"] == "abc"
        assert len((await client.get("/x")).headers["x-request-id"]) == 32
    async with client_of(ingress_of(recorder)) as client:
        assert "x-request-id" not in (await client.get("/x")).headers


@pytest.mark.parametrize("spaces", [0, 10_000], ids=["short", "long"])  # brackets of long bodies are counted by numpy
def test_depth_counts_brackets_outside_strings_only(spaces: int) -> None:
    rest = b" " * spaces
    assert parse_json(json.dumps({"a": "[" * 500, "b": '\\"[' * 100}).encode() + rest)
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(deepest + rest) is not None
    with pytest.raises(RequestError):
        parse_json(b"[" + deepest + b"]" + rest)
    mixed = b'{"a":[' * (MAX_DEPTH // 2 + 1) + b"]}" * (MAX_DEPTH // 2 + 1)
    with pytest.raises(RequestError):
        parse_json(mixed + rest)


@pytest.mark.parametrize(
    ("unit", "words"),
    [(b"{},", "arrays, objects and strings"), (b'"a",', "arrays, objects and strings"), (b"1,", "values")],
)
def test_bodies_of_too_many_parts_are_refused_before_they_are_built(unit: bytes, words: str) -> None:
    body = b'{"x": [' + (unit * ((8 << 20) // len(unit)))[:-1] + b"]}"
    with pytest.raises(RequestError, match=words):
        parse_json(body)
    few = b'{"x": [' + (unit * 50_000)[:-1] + b"]}"
    assert len(parse_json(few)["x"]) == 50_000


async def test_a_large_body_leaves_the_loop_free() -> None:
    body = b'{"x": [' + b'"' + b"\\n" * (4 << 20) + b'"]}'
    parsing = asyncio.create_task(BodyParser().parse(body))
    turns = 0
    while not parsing.done():
        await asyncio.sleep(0)
        turns += 1
    assert len((await parsing)["x"][0]) == 4 << 20
    assert turns > 3  # parsed here, it would have been done in the first one


@pytest.mark.parametrize("unit", [b"[]", b'"', b'\\"', b"[", b'"\\', b"{", b"\\"])
def test_hostile_bodies_cost_linear_time(unit: bytes) -> None:
    body = b'{"x": [' + unit * (2_000_000 // len(unit))
    start = time.thread_time()
    with pytest.raises(RequestError):
        parse_json(body)
    assert time.thread_time() - start < 2.0


def test_a_deep_body_is_refused_at_once() -> None:
    body = b"[" * 4_000_000 + b"]" * 4_000_000
    start = time.thread_time()
    with pytest.raises(RequestError, match="nests deeper"):
        parse_json(body)
    assert time.thread_time() - start < 1.0


def test_keys_are_kept_as_digests() -> None:
    ring = KeyRing(["secret-key"])
    assert "secret-key" not in repr(vars(ring))
    assert ring.owner([(b"authorization", b"Bearer secret-key")])
    assert ring.owner([(b"x-api-key", b"another")]) is None
    assert KeyRing([]).owner([]) == ""


async def test_what_needs_no_key_is_counted_to_none(recorder: Recorder) -> None:
    limits = KeyLimits(ServerConfig(api_key=["one", "two"], max_requests_per_minute=1))
    async with client_of(ingress_of(recorder, ("one", "two"), limits=limits)) as client:
        for _ in range(3):
            assert (await client.post("/ping")).status_code == 200
        one = {"x-api-key": "one"}
        assert [(await client.post("/x", headers=one)).status_code for _ in range(2)] == [200, 429]
