"""The admin listener: its own address and keys, and what it does to a real engine."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from pydantic import ValidationError

from frame.core.config.errors import ConfigError
from frame.core.config.server import ServerConfig
from frame.core.config.tree import FrameConfig
from frame.core.server.app import build_admin
from frame.plugins.endpoints.weights import WeightsEndpoint
from frame.testing import make_setup
from frame.testing.fake_serving import FakeServing
from tests.server.running import REAL, Running, server, until

BODY = {"prompt": "The sea is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
#: a request that still runs when a busy machine has seen that it does
FAULTY = "tests.server.faulty_processor:FaultyProcessor"
LONG = {"max_tokens": 80, "extra_args": {"fault": "slow"}}
ROUTES = (
    "/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/start_profile",
    "/stop_profile", "/shutdown", "/update_weights", "/adapters", "/adapters/x", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/collective_rpc", "/reset_mm_cache", "/reset_encoder_cache", "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admin")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    settings = ("--admin-port", "0", "--admin-key", "root", "--api-key", "user", "--profile-dir", str(folder),
                "--rpc-methods", "describe", "--rpc-methods", "no_such_method")  # fmt: skip
    with server(
        REAL, *settings, "--num-threads", "1", "--disable-access-log", "--logits-processors", FAULTY
    ) as running:
        until(lambda: "admin routes at" in running.text)
        yield running


@pytest.fixture(scope="module")
def admin(running: Running) -> Iterator[httpx.Client]:
    found = re.search(r"admin routes at (\S+)", running.text)
    assert found is not None
    with httpx.Client(base_url=found.group(1), headers={"x-api-key": "root"}, timeout=60) as client:
        yield client


def complete(running: Running, **fields: Any) -> httpx.Response:
    headers = {"Authorization": "Bearer user"}
    return httpx.post(f"{running.url}/v1/completions", json={**BODY, **fields}, headers=headers, timeout=60)


def text(running: Running, **fields: Any) -> str:
    answer = complete(running, **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def until_running(running: Running) -> None:
    headers = {"x-api-key": "user"}
    until(lambda: httpx.get(f"{running.url}/stats", headers=headers).json()["engine"]["running"] == 1)


def in_thread(running: Running, answers: list[httpx.Response], **fields: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(complete(running, **fields)))
    thread.start()
    return thread


def test_public_and_admin_routes_and_keys_do_not_mix(running: Running, admin: httpx.Client) -> None:
    for path in ROUTES:
        for method in ("GET", "POST"):
            public = httpx.request(method, running.url + path, headers={"x-api-key": "user"})
            assert public.status_code == 404, path
            assert httpx.request(method, running.url + path, headers={"x-api-key": "root"}).status_code == 401
            for key in ("user", "", "wrong"):
                assert admin.request(method, path, headers={"x-api-key": key}).status_code == 401
    assert admin.get("/v1/models").status_code == 404
    assert "/pause" not in httpx.get(f"{running.url}/openapi.json", headers={"x-api-key": "user"}).text


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_requests_go_on_afterwards(running: Running, admin: httpx.Client, level: int) -> None:
    wanted = text(running)
    assert admin.post("/sleep", json={"level": level}).json() == {"is_sleeping": True}
    assert admin.post("/sleep").status_code == 409
    answers: list[httpx.Response] = []
    thread = in_thread(running, answers)
    time.sleep(0.3)
    assert not answers
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    assert admin.post("/wake_up", json={"tags": ["weights"]}).json() == {"is_sleeping": True}
    assert admin.post("/wake_up", json={"tags": ["kv_cache"]}).json() == {"is_sleeping": False}
    thread.join(60)
    assert answers[0].json()["choices"][0]["text"] == wanted
    assert text(running) == wanted


def test_a_pause_freezes_waits_or_aborts(running: Running, admin: httpx.Client) -> None:
    wanted = text(running, max_tokens=LONG["max_tokens"])
    for mode, reason in (("keep", "length"), ("wait", "length"), ("abort", "abort")):
        answers: list[httpx.Response] = []
        thread = in_thread(running, answers, **LONG)
        until_running(running)
        assert admin.post("/pause", json={"mode": mode}).json() == {"is_paused": True}
        assert admin.get("/is_paused").json() == {"is_paused": True}
        if mode != "keep":
            thread.join(60)
            assert answers
        late: list[httpx.Response] = []
        waiting = in_thread(running, late, max_tokens=2)
        time.sleep(0.2)
        assert not late
        assert admin.post("/resume").json() == {"is_paused": False}
        waiting.join(60)
        thread.join(60)
        assert late[0].status_code == 200
        choice = answers[0].json()["choices"][0]
        assert choice["finish_reason"] == reason
        assert wanted.startswith(choice["text"]) if mode == "abort" else choice["text"] == wanted
    assert admin.post("/pause", json={"mode": "nap"}).status_code == 409


def test_profiles_and_caches(running: Running, admin: httpx.Client) -> None:
    assert admin.post("/start_profile").status_code == 200
    text(running, max_tokens=2)
    assert Path(admin.post("/stop_profile").json()["file"]).stat().st_size > 1000
    assert admin.post("/stop_profile").status_code == 409
    assert admin.post("/reset_prefix_cache").json() == {"success": True}


def test_workers_are_called_by_the_names_that_are_allowed(admin: httpx.Client) -> None:
    (facts,) = admin.post("/collective_rpc", json={"method": "describe", "timeout": 30}).json()["results"]
    assert facts["platform"] == "cpu"
    for body, status, said in (
        ({"method": "update_weights"}, 403, "--rpc-methods allows: describe, no_such_method"),
        ({"method": "describe", "kwargs": {"no": 1}}, 409, "no"),
        ({"method": "describe", "args": [1]}, 400, "kwargs"),
        ({"method": "describe", "kwargs": {"method": "update_weights"}}, 400, "'method'"),
        ({"method": "no_such_method"}, 409, "no worker method 'no_such_method'"),
        ({}, 400, "method is missing"),
    ):
        answer = admin.post("/collective_rpc", json=body)
        assert answer.status_code == status, answer.text
        assert said in answer.json()["error"]["message"]
    assert admin.get("/is_paused").json() == {"is_paused": False}


def test_an_update_that_takes_too_long_holds_no_requests_back() -> None:
    told: list[str] = []

    class SlowServing(FakeServing):
        async def control(self, method: str, arguments: dict[str, Any]) -> Any:
            told.append(method)
            if method == "update_weights":
                await asyncio.Event().wait()
            return 0

    config, serving = FrameConfig(), cast(Any, SlowServing())
    app = build_admin(config, [WeightsEndpoint(make_setup("endpoint", config=config, serving=serving))])

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=cast(Any, app)), base_url="http://t") as client:
            return await client.post("/update_weights", json={}, headers={"x-request-timeout": "0.1"})

    answer = asyncio.run(send())
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert told == ["is_paused", "pause", "update_weights", "resume"]


@pytest.mark.parametrize("name", ["execute", "update_weights", "run", "_timed"])
def test_methods_of_the_engine_cannot_be_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"rpc_methods may not name '{name}'"):
        FrameConfig.from_flat(rpc_methods=[name], admin_uds="/tmp/x")


def test_methods_need_an_admin_listener() -> None:
    with pytest.raises(ConfigError, match="rpc_methods needs admin_uds or admin_port"):
        FrameConfig.from_flat(rpc_methods=["describe"])


def test_caches_and_scaling_that_there_are_not(admin: httpx.Client) -> None:
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert admin.post(path).json() == {"success": True}
    answer = admin.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert answer.status_code == 400
    assert "the engines share no experts, so their number is fixed" in answer.json()["error"]["message"]
    assert admin.post("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}


@pytest.mark.parametrize(
    ("path", "field"),
    [("/pause", "mode"), ("/sleep", "level"), ("/wake_up", "tags"), ("/reset_prefix_cache", "reset_connector"),
     ("/update_weights", "model"), ("/update_weights", "mode"),
     ("/collective_rpc", "method"), ("/collective_rpc", "timeout"), ("/scale_elastic_ep", "new_data_parallel_size")],
)  # fmt: skip
def test_odd_bodies_are_refused_and_change_nothing(admin: httpx.Client, path: str, field: str) -> None:
    odd: list[Any] = [[None], {}, ["x" * 99], 10**40, -1, "x" * 5000, {"a": {}}]
    bodies = [json.dumps({field: value}) for value in odd]
    for body in (*bodies, "[]", '"x"', "null", "{", '{"a": NaN}', "\ud800".encode("utf-8", "surrogatepass")):
        answer = admin.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["message"]
    assert admin.get("/is_paused").json() == {"is_paused": False}
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}


def test_shutdown_drains(running: Running, admin: httpx.Client) -> None:
    answers: list[httpx.Response] = []
    thread = in_thread(running, answers, **LONG)
    until_running(running)
    assert admin.post("/shutdown").json() == {"stopping": True}
    thread.join(60)
    assert answers[0].status_code == 200
    assert running.wait() == 0


def test_a_port_needs_a_key() -> None:
    with pytest.raises(ValidationError, match="set admin_key, or use admin_uds"):
        ServerConfig(admin_port=9000)
    with pytest.raises(ValidationError, match="exclude each other"):
        ServerConfig(admin_port=9000, admin_uds="/tmp/x", admin_key=["k"])
