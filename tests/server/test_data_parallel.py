"""A server with several engines: requests are spread, metrics tell engines apart, one that dies loses no request."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import FAKE, REAL, Running, server, until

TWO = ("--data-parallel-size", "2", "--disable-access-log")


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with server(FAKE, *TWO, "--api-server-count", "2", "--plugin.fake.delay", "0.005") as running:
        yield running


def by_engine(running: Running, name: str) -> dict[str, float]:
    """Engine → value of a metric."""
    text = httpx.get(running.url + "/metrics", timeout=60).text
    return {rank: float(value) for rank, value in re.findall(rf'^{name}{{engine="(\d+)".*}} (\S+)$', text, re.M)}


def texts(running: Running, requests: list[dict[str, Any]]) -> list[str]:
    """The streamed text of each request, all at once."""

    def one(request: dict[str, Any]) -> str:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120)
        with client, client.completions.create(model="demo", stream=True, **request) as stream:
            return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(one, requests))


def test_requests_of_all_api_processes_are_spread_over_engines(fake: Running) -> None:
    assert len(fake.children_named("engine")) == 2
    requests = [{"prompt": f"{index} words", "max_tokens": 40} for index in range(24)]
    answers = texts(fake, requests)
    assert all(answers)
    generated = by_engine(fake, "frame_engine_steps_total")
    assert sorted(generated) == ["0", "1"]
    assert min(generated.values()) > 0
    stats = httpx.get(f"{fake.url}/stats").json()["engine"]
    assert stats["generated_tokens"] == sum(one["generated_tokens"] for one in stats["ranks"]) == 24 * 40
    assert max(one["generated_tokens"] for one in stats["ranks"]) <= 0.75 * 24 * 40


@pytest.mark.matrix
def test_a_killed_engine_costs_no_request(fake: Running) -> None:
    requests = [{"prompt": f"{index} words", "max_tokens": 400} for index in range(12)]
    calm = texts(fake, requests)
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(texts, fake, requests)
        until(lambda: sum(by_engine(fake, "frame_num_requests_running").values()) == 12)
        victim = fake.children_named("engine")[0]
        os.kill(victim, signal.SIGKILL)
        assert httpx.get(f"{fake.url}/health").status_code == 200
        assert answers.result() == calm
    until(lambda: by_engine(fake, "frame_engine_up") == {"0": 1, "1": 1})
    assert victim not in fake.children_named("engine")
    fake.until_said("engine [01]: the engine process was killed .*; starting it again")


@pytest.mark.matrix
def test_only_some_engines_of_several_servers() -> None:
    ranks = ("--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-start-rank", "2")
    with server(FAKE, *ranks, "--data-parallel-hybrid-lb") as running:
        assert sorted(by_engine(running, "frame_engine_up")) == ["2", "3"]
        texts(running, [{"prompt": f"{index} words", "max_tokens": 4} for index in range(4)])
    with server(FAKE, "--data-parallel-size", "4", "--data-parallel-rank", "3") as running:
        assert sorted(by_engine(running, "frame_engine_up")) == ["3"]


@pytest.mark.timeout(300)
def test_engines_give_the_tokens_of_one_and_a_killed_one_its_requests_again() -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": f"Once upon a time {index}", "temperature": index % 2, "seed": index, "max_tokens": 200}
        for index in range(6)
    ]
    for request in requests:  # which go on until they are seen to run
        request["extra_body"] = {"ignore_eos": True}
    settings = ("--deterministic", "--num-threads", "1", "--disable-access-log")
    with server(REAL, *settings) as running:
        alone = texts(running, requests)
    with server(REAL, *TWO, *settings) as running:
        assert texts(running, requests) == alone
        with ThreadPoolExecutor(1) as threads:
            answers = threads.submit(texts, running, requests)
            until(lambda: sum(by_engine(running, "frame_num_requests_running").values()) >= 2)
            os.kill(running.children_named("engine")[1], signal.SIGKILL)
            assert answers.result() == alone
