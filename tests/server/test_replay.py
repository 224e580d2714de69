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

pytestmark = pytest.mark.timeout(600)  # of a busy machine; an engine starts in 3 seconds on an idle one
FAULTY = "tests.server.faulty_processor:FaultyProcessor"
SETTINGS = ("--logits-processors", FAULTY, "--hang-seconds", "10", "--num-threads", "1", "--disable-access-log")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
SAY = [{"role": "user", "content": "Tell me a story."}]
#: what must survive: greedy, drawn, penalised, cut at a stop string, several outputs, with log-probabilities
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 0},
    {"prompt": "The sea is", "temperature": 1, "seed": 5},
    {"prompt": "The sea is", "temperature": 0.8, "seed": 6, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"prompt": "A cat and a dog", "temperature": 1, "seed": 7, "n": 2},
    {"prompt": "A house", "temperature": 0, "logprobs": 2, "extra_body": {"min_tokens": 40, "prompt_logprobs": 1}},
    {"prompt": "My friend", "temperature": 1, "seed": 9, "stop": ["qz", "zq"]},
    {"prompt": "The tree", "seed": 8, "logit_bias": {"30": 5, "40": -100}, "extra_body": {"repetition_penalty": 1.3}},
    {"prompt": "The bird", "seed": 8, "extra_body": {"bad_words": ["the", "and"], "stop_token_ids": [11]}},
    {
        "messages": SAY,
        "seed": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    {"messages": SAY, "seed": 4, "tools": [TOOL], "tool_choice": "required"},
    {"prompt": "A star", "seed": 1, "extra_body": {"structured_outputs": {"regex": "([a-z]{3} ){90}"}}},
]
#: what must survive with the same bits, although it goes on in another batch
EXACT: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 0, "logprobs": 3, "max_tokens": 48},
    {"prompt": "The sea is", "temperature": 1.2, "seed": 5, "logprobs": 2, "n": 3, "max_tokens": 48},
    {"prompt": "The sea is", "seed": 6, "logprobs": 1, "presence_penalty": 1.5, "extra_body": {"prompt_logprobs": 1}},
    {"prompt": "A star", "seed": 1, "logprobs": 1, "extra_body": {"structured_outputs": {"regex": "([a-z]{3} ){90}"}}},
]
LENGTH = 64


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(REAL, *SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> list[Any]:
    return together(client, lambda: None)


def stream(client: openai.OpenAI, request: dict[str, Any], begun: threading.Event | None = None) -> Any:
    """All that a streamed completion or chat says, by index: texts, ids, log-probabilities, why it ended."""
    extra = {"return_token_ids": True, **request.get("extra_body", {})}
    if "messages" not in request:
        extra["ignore_eos"] = "structured_outputs" not in extra
    body = {"model": "demo", "max_tokens": LENGTH, **request, "extra_body": extra}
    make: Any = client.chat.completions.create if "messages" in request else client.completions.create
    seen: dict[int, dict[str, Any]] = {}
    for count, chunk in enumerate(make(**body, stream=True)):
        if count == 5 and begun is not None:
            begun.set()
        for choice in chunk.choices:
            one = seen.setdefault(choice.index, {"text": "", "ids": [], "logprobs": [], "prompt": []})
            one["text"] += text_of(choice)
            fields = choice.model_extra or {}
            one["ids"] += fields.get("token_ids") or []
            one["prompt"] += fields.get("prompt_logprobs") or []
            if choice.logprobs is not None and getattr(choice.logprobs, "tokens", None):
                one["logprobs"] += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
            one["end"] = choice.finish_reason or one.get("end")
    if begun is not None:
        begun.set()
    return seen


def text_of(choice: Any) -> str:
    delta = getattr(choice, "delta", None)
    if delta is None:
        return choice.text or ""
    calls = "".join(call.function.arguments or "" for call in delta.tool_calls or ())
    return (delta.content or "") + calls


def loose(seen: Any) -> Any:
    """Without the last bits of log-probabilities, which depend on what a request was batched with."""
    return {
        index: {
            **one,
            "logprobs": [token for token, _ in one["logprobs"]],
            "prompt": [rounded(place) for place in one["prompt"]],
        }
        for index, one in seen.items()
    }


class Near(float):
    """Equal to what differs in the last bits only, wherever rounding would cut."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = None  # type: ignore[assignment]


def rounded(place: dict[str, Any] | None) -> dict[str, Near]:
    return {token: Near(entry["logprob"]) for token, entry in (place or {}).items()}


def together(
    client: openai.OpenAI, disturb: Callable[[], None], requests: list[dict[str, Any]] | None = None
) -> list[Any]:
    """All streams at once, disturbed as soon as each of them has begun."""
    exact = requests is not None
    requests = REQUESTS if requests is None else requests
    with ThreadPoolExecutor(len(requests)) as pool:
        begun = [threading.Event() for _ in requests]
        results: list[Future[Any]] = [
            pool.submit(stream, client, one, event) for one, event in zip(requests, begun, strict=True)
        ]
        for event in begun:
            assert event.wait(120)
        disturb()
        return [result.result() if exact else loose(result.result()) for result in results]


def kill(running: Running) -> int:
    pid = running.children()["engine"]
    os.kill(pid, signal.SIGKILL)
    return pid


def until_another(running: Running, pid: int) -> None:
    until(lambda: running.children().get("engine", pid) != pid, 60, lambda: running.text)


def test_streams_go_on_when_the_engine_is_killed_in_decode_and_its_successor_while_it_loads(
    running: Running, client: openai.OpenAI, undisturbed: list[Any]
) -> None:
    def disturb() -> None:
        until_another(running, kill(running))
        until(lambda: running.engine("/ready").status_code == 503, 20)
        assert running.engine("/live").status_code == 200
        until_another(running, kill(running))
        until(lambda: running.engine("/ready").status_code == 200, 120)

    assert together(client, disturb) == undisturbed


@pytest.mark.slow
def test_streams_go_on_when_the_engine_is_killed_again_and_again(
    running: Running, client: openai.OpenAI, undisturbed: list[Any]
) -> None:
    def disturb() -> None:
        for _ in range(3):
            kill(running)
            until(lambda: running.engine().status_code == 503, 20)
            until(lambda: running.engine().status_code == 200, 120)
            time.sleep(0.3)

    assert together(client, disturb) == undisturbed


def test_a_long_prompt_survives_a_kill_in_prefill(running: Running, client: openai.OpenAI) -> None:
    request = {"prompt": "The little cat sat down by the sea. " * 40, "temperature": 1, "seed": 3, "max_tokens": 40}
    request["extra_body"] = {"cache_salt": "first", "prompt_logprobs": 1}
    wanted = loose(stream(client, request))
    request["extra_body"] = {"cache_salt": "second", "prompt_logprobs": 1}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, client, request)
        until(lambda: running.metric("frame_num_requests_running") == 1)
        kill(running)
        assert loose(answer.result()) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", [0, 3, 10, 30, 100])
def test_a_kill_at_any_moment_of_the_prefill_costs_nothing(
    running: Running, client: openai.OpenAI, milliseconds: int
) -> None:
    """The engine is held still until the request has arrived, and killed a moment after it goes on."""
    request = {"prompt": "The little cat sat down by the sea. " * 40, "temperature": 1, "seed": 3, "max_tokens": 24}
    request["extra_body"] = {"cache_salt": "undisturbed", "prompt_logprobs": 1, "deterministic": True}
    wanted = stream(client, request)
    request["extra_body"]["cache_salt"] = f"killed {milliseconds}"
    pid = running.children()["engine"]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, client, request)
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)
        time.sleep(milliseconds / 1000)
        os.kill(pid, signal.SIGKILL)
        assert answer.result() == wanted
    until(lambda: running.engine("/ready").status_code == 200, 120)


@pytest.mark.matrix
def test_deterministic_streams_go_on_with_the_same_bits(running: Running, client: openai.OpenAI) -> None:
    requests = [{**one, "extra_body": {**one.get("extra_body", {}), "deterministic": True}} for one in EXACT]
    alone = [stream(client, one) for one in requests]

    def disturb() -> None:
        kill(running)

    together_again = together(client, disturb, [*requests, *REQUESTS[:2]])
    assert together_again[: len(alone)] == alone


def test_requests_that_come_while_there_is_no_engine_wait_for_it(running: Running, client: openai.OpenAI) -> None:
    kill(running)
    until(lambda: running.engine().status_code == 503, 20)
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
    until(lambda: running.engine().status_code == 200, 120)


@pytest.mark.slow
def test_a_hung_engine_is_found_and_replaced(running: Running, client: openai.OpenAI, undisturbed: list[Any]) -> None:
    def disturb() -> None:
        extra = {"ignore_eos": True, "extra_args": {"fault": "hang", "at": 2}}
        answer = client.completions.create(model="demo", prompt="Slow", max_tokens=8, extra_body=extra)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8

    assert together(client, disturb) == undisturbed
    running.until_said(r"hung: no step ended within 10 seconds \(--hang-seconds\)")


@pytest.mark.slow
def test_a_worker_that_is_killed_while_one_request_runs_is_not_its_fault() -> None:
    with server(REAL, "--executor", "process", "--num-threads", "1", "--disable-access-log") as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            request = {"prompt": "The sea is", "temperature": 1, "seed": 5, "max_tokens": 400, "logprobs": 1}
            request["extra_body"] = {"deterministic": True}
            wanted = stream(client, request)

            def disturb() -> None:
                for _ in range(2):
                    [worker] = running.below("engine")
                    os.kill(worker, signal.SIGKILL)
                    until(lambda: running.engine("/ready").status_code == 503, 20)
                    until(lambda: running.engine("/ready").status_code == 200, 120)
                    time.sleep(0.2)

            assert together(client, disturb, [request]) == [wanted]
        running.until_said("the worker process died with exit status -9", 2)


def test_nothing_is_left_running(running: Running) -> None:
    until(lambda: running.metric("frame_num_requests_running") == 0)
    assert running.metric("frame_kv_cache_usage_perc") == 0
    assert set(running.children()) == {"api", "engine"}
    assert httpx.get(f"{running.url}/health").status_code == 200
