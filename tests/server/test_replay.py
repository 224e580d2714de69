"""Engines that are killed, crash and hang under real clients: every stream must be that of an undisturbed run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import REAL, Running, server, until

FAULTY = "tests.server.faulty_processor:FaultyProcessor"
SETTINGS = ("--logits-processors", FAULTY, "--hang-seconds", "6", "--num-threads", "1", "--disable-access-log")
#: what must survive: greedy, drawn, penalised, cut at a stop string, several outputs, with log-probabilities
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 0},
    {"prompt": "The sea is", "temperature": 1, "seed": 5},
    {"prompt": "The sea is", "temperature": 0.8, "seed": 6, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"prompt": "A cat and a dog", "temperature": 1, "seed": 7, "n": 2},
    {"prompt": "A house", "temperature": 0, "logprobs": 2, "extra_body": {"min_tokens": 40, "prompt_logprobs": 1}},
    {"prompt": "My friend", "temperature": 1, "seed": 9, "stop": ["qz", "zq"]},
]
LENGTH = 120


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(REAL, *SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> list[Any]:
    return together(client, lambda: None)


def stream(client: openai.OpenAI, request: dict[str, Any], begun: threading.Event | None = None) -> Any:
    """All that a streamed completion says, by index: texts, token ids, log-probabilities, why it ended."""
    extra = {"ignore_eos": True, "return_token_ids": True, **request.get("extra_body", {})}
    body = {"model": "demo", "max_tokens": LENGTH, **request, "extra_body": extra}
    seen: dict[int, dict[str, Any]] = {}
    for count, chunk in enumerate(client.completions.create(**body, stream=True)):
        if count == 5 and begun is not None:
            begun.set()
        for choice in chunk.choices:
            one = seen.setdefault(choice.index, {"text": "", "ids": [], "logprobs": [], "prompt": []})
            one["text"] += choice.text
            fields = choice.model_extra or {}
            one["ids"] += fields.get("token_ids") or []
            one["prompt"] += [rounded(place) for place in fields.get("prompt_logprobs") or []]
            if choice.logprobs is not None and choice.logprobs.tokens:
                one["logprobs"] += choice.logprobs.tokens
            one["end"] = choice.finish_reason or one.get("end")
    return seen


def rounded(place: dict[str, Any] | None) -> dict[str, float]:
    """The last bits depend on what a prompt was batched with."""
    return {token: round(entry["logprob"], 3) for token, entry in (place or {}).items()}


def together(
    client: openai.OpenAI, disturb: Callable[[], None], requests: list[dict[str, Any]] | None = None
) -> list[Any]:
    """All streams at once, disturbed as soon as each of them has begun."""
    requests = REQUESTS if requests is None else requests
    with ThreadPoolExecutor(len(requests)) as pool:
        begun = [threading.Event() for _ in requests]
        results: list[Future[Any]] = [
            pool.submit(stream, client, one, event) for one, event in zip(requests, begun, strict=True)
        ]
        for event in begun:
            assert event.wait(60)
        disturb()
        return [result.result() for result in results]


def kill(running: Running) -> int:
    pid = running.children()["engine"]
    os.kill(pid, signal.SIGKILL)
    return pid


def until_another(running: Running, pid: int) -> None:
    until(lambda: running.children().get("engine", pid) != pid, 10, lambda: running.text)


def test_streams_go_on_when_the_engine_is_killed_in_decode_and_its_successor_while_it_loads(
    running: Running, client: openai.OpenAI, undisturbed: list[Any]
) -> None:
    def disturb() -> None:
        until_another(running, kill(running))
        until(lambda: running.engine("/ready").status_code == 503, 5)
        assert running.engine("/live").status_code == 200
        until_another(running, kill(running))
        until(lambda: running.engine("/ready").status_code == 200, 30)

    assert together(client, disturb) == undisturbed


@pytest.mark.slow
def test_streams_go_on_when_the_engine_is_killed_again_and_again(
    running: Running, client: openai.OpenAI, undisturbed: list[Any]
) -> None:
    def disturb() -> None:
        for _ in range(3):
            kill(running)
            until(lambda: running.engine().status_code == 503, 5)
            until(lambda: running.engine().status_code == 200, 30)
            time.sleep(0.3)

    assert together(client, disturb) == undisturbed


def test_a_long_prompt_survives_a_kill_in_prefill(running: Running, client: openai.OpenAI) -> None:
    request = {"prompt": "The little cat sat down by the sea. " * 40, "temperature": 1, "seed": 3, "max_tokens": 40}
    request["extra_body"] = {"cache_salt": "first", "prompt_logprobs": 1}
    wanted = stream(client, request)
    request["extra_body"] = {"cache_salt": "second", "prompt_logprobs": 1}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, client, request)
        until(lambda: running.metric("frame_num_requests_running") == 1)
        kill(running)
        assert answer.result() == wanted


def test_requests_that_come_while_there_is_no_engine_wait_for_it(running: Running, client: openai.OpenAI) -> None:
    kill(running)
    until(lambda: running.engine().status_code == 503, 5)
    answer = client.completions.create(model="demo", prompt="Hello", max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("fault", ["raise", pytest.param("exit", marks=pytest.mark.slow)])
def test_a_request_that_breaks_its_step_fails_alone(
    running: Running, client: openai.OpenAI, undisturbed: list[Any], fault: str
) -> None:
    error: list[openai.APIError] = []

    def disturb() -> None:
        extra = {"ignore_eos": True, "extra_args": {"fault": fault, "at": 4}}
        with pytest.raises(openai.APIError) as caught:
            client.completions.create(model="demo", prompt="Bad", max_tokens=20, extra_body=extra)
        error.append(caught.value)

    assert together(client, disturb) == undisturbed
    wanted = {"raise": "an internal error ended the step", "exit": "ended with status 7 each time the request"}
    assert wanted[fault] in str(error[0])
    until(lambda: running.engine().status_code == 200, 30)


@pytest.mark.slow
def test_a_hung_engine_is_found_and_replaced(running: Running, client: openai.OpenAI, undisturbed: list[Any]) -> None:
    def disturb() -> None:
        extra = {"ignore_eos": True, "extra_args": {"fault": "hang", "at": 2}}
        answer = client.completions.create(model="demo", prompt="Slow", max_tokens=8, extra_body=extra)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8

    assert together(client, disturb) == undisturbed
    assert "hung: no step ended within 6 seconds (--hang-seconds)" in running.text


def test_nothing_is_left_running(running: Running) -> None:
    until(lambda: running.metric("frame_num_requests_running") == 0)
    assert running.metric("frame_kv_cache_usage_perc") == 0
    assert set(running.children()) == {"api", "engine"}
    assert httpx.get(f"{running.url}/health").status_code == 200
