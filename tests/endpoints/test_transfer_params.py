"""Parameters of a KV transfer go to the engine and back on every route that generates, and are bounded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from frame.plugins.endpoints.transfer_params import MAX_DEPTH, MAX_NAMES, MAX_PARTS, MAX_VALUES, TransferParams
from tests.server.running import FAKE, Running, server

CHAT = [{"role": "user", "content": "Once upon a time"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "Once upon a time", "max_output_tokens": 2},
}
#: as proxies send them to an engine that prefills, and to one that decodes
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3], [7]],
    "remote_engine_id": "a1",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_blocks_expiry_time": 12.5,
}
READ = TypeAdapter(TransferParams)


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth - 1):
        value = [value]
    return {"a": value}


WRONG: dict[str, tuple[Any, str]] = {
    "depth": (nested(MAX_DEPTH + 1), "at most 3 deep"),
    "values": ({"a": [[1] * MAX_VALUES, [1]]}, "at most 65536 values"),
    "parts": ({"a": [[]] * MAX_PARTS}, "at most 4096 objects and lists"),
    "names": ({str(number): 1 for number in range(MAX_NAMES + 1)}, "at most 64 names"),
    "inner names": ({"a": {str(number): 1 for number in range(MAX_NAMES)}}, "at most 64 names"),
    "list": ([1], "must be an object, got [1]"),
    "text": ("x" * 400, "(400 characters)"),
    "long name": ({"a" * 257: 1}, "at most 256 characters"),
    "long text": ({"a": "b" * 4097}, "at most 4096 characters"),
    "large": ({"a": 1 << 64}, "out of range"),
    "infinite": ({"a": 1e39}, "out of range"),
    "no truth": ({"do_remote_prefill": "yes"}, "do_remote_prefill must be true or false, got 'yes'"),
    "no truth either": ({"do_remote_decode": 1}, "do_remote_decode must be true or false, got 1"),
    "both": ({"do_remote_prefill": True, "do_remote_decode": True}, "do_remote_prefill and do_remote_decode"),
}


@pytest.fixture(scope="module")
def texts() -> Iterator[Running]:
    with server(FAKE, "--plugin.fake.vocab_size", "2048", "--disable-access-log") as running:
        yield running


@pytest.fixture(scope="module")
def ids() -> Iterator[Running]:
    with server(FAKE, "--tokens-only", "--disable-access-log") as running:
        yield running


@pytest.fixture
def running(route: str, request: pytest.FixtureRequest) -> Running:
    """A server that has the route."""
    found: Running = request.getfixturevalue("ids" if "inference" in route else "texts")
    return found


def test_what_proxies_send_is_taken_as_it_is() -> None:
    many = {"remote_block_ids": [list(range(MAX_VALUES)), []]}
    for given in (PREFILL, DECODE, many, {}, nested(MAX_DEPTH), {"a": {"b": {"c": None}}}):
        assert READ.validate_python(given) == given


@pytest.mark.parametrize(("given", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told(given: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        READ.validate_python(given)


@pytest.mark.parametrize("given", [{"a": float("nan")}, {"a": [float("-inf")]}, {1: 2}, {"a": b"x"}], ids=str)
def test_what_json_cannot_say_is_refused_too(given: Any) -> None:
    with pytest.raises(ValidationError):
        READ.validate_python(given)


@pytest.mark.parametrize("route", ROUTES)
def test_they_reach_the_engine_and_come_back(running: Running, route: str) -> None:
    body = ROUTES[route]
    for given in (PREFILL, DECODE):
        answer = httpx.post(running.url + route, json={**body, "kv_transfer_params": given}, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["kv_transfer_params"]["echo"] == given
    plain = httpx.post(running.url + route, json=body, timeout=30)
    assert plain.status_code == 200
    assert plain.json().get("kv_transfer_params") is None


@pytest.mark.parametrize("route", ROUTES)
def test_wrong_ones_are_the_clients_fault(running: Running, route: str) -> None:
    for given, said in WRONG.values():
        answer = httpx.post(running.url + route, json={**ROUTES[route], "kv_transfer_params": given}, timeout=30)
        assert answer.status_code == 400, (given, answer.text)
        assert said in answer.text
        assert "kv_transfer_params" in answer.text
    content = json.dumps({**ROUTES[route], "kv_transfer_params": {"a": float("nan")}})
    answer = httpx.post(running.url + route, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize("route", ["/v1/responses"])
def test_a_stored_response_keeps_them(running: Running, route: str) -> None:
    first = httpx.post(running.url + route, json={**ROUTES[route], "kv_transfer_params": DECODE}, timeout=30).json()
    kept = httpx.get(f"{running.url}/v1/responses/{first['id']}").json()
    assert kept["kv_transfer_params"]["echo"] == DECODE
