"""What bounds clients: keys' limits, deadlines, the queue; and several API processes behind one port."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from frame.core.config.flat import from_flat
from frame.core.config.server import ServerConfig
from frame.core.interfaces.errors import RequestError
from frame.core.processes.launcher import share_between_keys
from frame.core.server.keys import KeyLimits
from tests.server.running import FAKE, Running, server, until

BODY = {"prompt": "once upon a time", "max_tokens": 480, "ignore_eos": True}
KEYS = {"Authorization": "Bearer one"}
SETTINGS = (
    "--plugin.fake.delay", "0.01", "--plugin.fake.vocab_size", "2048", "--disable-access-log",
    "--api-key", "one", "--api-key", "two", "--api-key", "three", "--max-requests-per-key", "3",
    "--max-requests-per-minute", "40", "--api-server-count", "2", "--max-outputs-per-key", "8",
)  # fmt: skip


def test_processes_count_together_and_forget_the_dead() -> None:
    memory = os.memfd_create("limits")
    server = ServerConfig(api_key=["a", "b"], max_requests_per_key=2)
    first, second = (KeyLimits(server, memory, index) for index in range(2))
    a, b = (hashlib.sha256(key.encode()).hexdigest() for key in "ab")
    with ExitStack() as stack:
        stack.enter_context(first.admit(a))
        stack.enter_context(second.admit(a))
        stack.enter_context(second.admit(b))
        with pytest.raises(RequestError, match="2 requests under way"):
            stack.enter_context(first.admit(a))
        KeyLimits(server, memory, 1)  # the second one's successor
        stack.enter_context(first.admit(a))


def test_a_bucket_fills_evenly() -> None:
    limits = KeyLimits(ServerConfig(max_requests_per_minute=600))
    for _ in range(600):
        with limits.admit(""):
            pass
    refused = []
    for _ in range(50):
        try:
            with limits.admit(""):
                pass
        except RequestError as error:
            refused.append(error)
    assert refused
    assert refused[0].retry_after == 1
    time.sleep(0.25)
    with limits.admit(""):
        pass


def test_outputs_are_counted_while_they_are_generated() -> None:
    memory = os.memfd_create("limits")
    server = ServerConfig(api_key=["a"], max_outputs_per_key=64)
    first, second = (KeyLimits(server, memory, index) for index in range(2))
    with ExitStack() as stack:
        stack.enter_context(first.outputs("", 40))
        stack.enter_context(second.outputs("", 20))
        with pytest.raises(RequestError, match="60 outputs under way and asks for 5 more; its limit is 64") as refused:
            stack.enter_context(first.outputs("", 5))
        assert refused.value.status == 429
        stack.enter_context(first.outputs("", 4))
    with first.outputs("", 64):
        pass


def test_tokens_are_paid_for_afterwards() -> None:
    owner, other = (hashlib.sha256(key.encode()).hexdigest() for key in ("a", "b"))
    limits = KeyLimits(ServerConfig(api_key=["a", "b"], max_tokens_per_minute=6000))
    with limits.admit(owner):
        limits.spend(owner, 5900)
    assert limits.delay(owner) == 0
    with limits.admit(owner):
        limits.spend(owner, 300)
    with pytest.raises(RequestError, match="may use 6000 tokens in a minute") as refused, limits.admit(owner):
        pass
    assert refused.value.retry_after in (2, 3)
    assert 1 < limits.delay(owner) < 3
    assert limits.delay(other) == limits.delay("a key that the server had") == 0


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(FAKE, *SETTINGS) as running:
        yield running


def post(running: Running, key: str = "two", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", **fields.pop("headers", {})}
    return httpx.post(f"{running.url}/v1/completions", json={**BODY, **fields}, headers=headers, timeout=60)


def test_deadlines_end_requests_clearly(running: Running) -> None:
    for fields in ({"timeout": 0.3}, {"headers": {"X-Request-Timeout": "0.3"}}):
        answer = post(running, **fields)
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "the request did not end within its 0.3 seconds"
        assert answer.headers["x-should-retry"] == "false"
    streamed = post(running, timeout=2, stream=True)
    assert streamed.status_code == 200
    assert "did not end within its 2 seconds" in streamed.text.split("\n\n")[-2]
    assert post(running, timeout=30, max_tokens=3).status_code == 200
    for wrong in ("soon", -1, 0, True, 10**400):
        refused = post(running, timeout=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "timeout"
    headers = {"Authorization": "Bearer two"}
    until(lambda: httpx.get(f"{running.url}/stats", headers=headers).json()["engine"]["running"] == 0)


def test_a_key_has_a_share_and_a_rate(running: Running) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(headers={"x-api-key": "three"}, timeout=60))
        for _ in range(3):
            stack.enter_context(client.stream("POST", f"{running.url}/v1/completions", json={**BODY, "stream": True}))
        refused = post(running, "three")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        assert post(running, "two", max_tokens=1).status_code == 200

    def many() -> None:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="one", max_retries=0) as api:
            for _ in range(400):  # more than come free meanwhile, however slow this is
                api.completions.create(model="demo", prompt="x", max_tokens=1)

    with pytest.raises(openai.RateLimitError, match="40 requests in a minute") as caught:
        many()
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert httpx.get(f"{running.url}/v1/models", headers=KEYS).status_code == 200  # costs nothing, is not counted


def test_a_full_queue_is_told_before_the_stream_begins(running: Running) -> None:
    for stream in (False, True):
        refused = post(running, stream=stream, extra_args={"fault": "queue"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")


def test_two_processes_serve_one_port_and_count_together(running: Running) -> None:
    apis = running.children_named("api")
    assert len(apis) == 2
    headers = {"Authorization": "Bearer two"}

    def finished() -> set[str]:
        texts = [httpx.get(f"{running.url}/metrics", headers=headers).text for _ in range(8)]
        return {line for text in texts for line in text.splitlines() if line.startswith("frame_request_success_total")}

    def told_alike() -> bool:
        lines = finished()
        return len(lines) == len({line.rsplit(" ", 1)[0] for line in lines})

    until(told_alike, explain=lambda: "processes tell different counts")  # what ended just now may still be counted
    os.kill(apis[0], signal.SIGKILL)
    until(lambda: running.text.count("serving demo at") == 2, 60, lambda: running.text)
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(post(running, max_tokens=2).status_code)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 3


def test_a_key_may_have_so_many_outputs_under_way(running: Running) -> None:
    body = {"prompt": ["once", "upon"], "max_tokens": 4, "n": 5}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, headers={"Authorization": "Bearer three"})
    assert answer.status_code == 429
    assert "(--max-outputs-per-key)" in answer.json()["error"]["message"]
    body["n"] = 4
    answer = httpx.post(f"{running.url}/v1/completions", json=body, headers={"Authorization": "Bearer three"})
    assert answer.status_code == 200


def test_with_keys_requests_are_served_by_turns() -> None:
    def policy(**settings: Any) -> str:
        return share_between_keys(from_flat(settings)).scheduler.scheduling_policy

    assert policy() == "fcfs"
    assert policy(api_key=["a", "b"]) == "fair"
    assert policy(api_key=["a", "b"], scheduling_policy="fcfs") == "fcfs"
