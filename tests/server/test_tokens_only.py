"""`--tokens-only`: a server without a tokenizer, between front ends that have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import FAKE, Running, server

IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(
        FAKE, "--tokens-only", "--api-key", "k", "--enable-prompt-tokens-details", "--disable-access-log"
    ) as it:
        yield it


def ask(running: Running, path: str = "/inference/v1/generate", **body: Any) -> httpx.Response:
    return httpx.post(running.url + path, json=body, headers={"x-api-key": "k"}, timeout=60)


def test_token_ids_go_in_and_out(running: Running) -> None:
    answer = ask(running, token_ids=IDS, sampling_params={"max_tokens": 6, "n": 2}, request_id="mine")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["request_id"] == "generate-mine"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        assert choice["token_ids"] == [5, 6, 7, 8, 5, 6]
        assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_streams_say_the_same(running: Running) -> None:
    sampling = {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 1, "stop_token_ids": [8]}
    whole = ask(running, token_ids=IDS, sampling_params=sampling).json()
    lines = ask(running, token_ids=IDS, sampling_params=sampling, stream=True).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"] == IDS
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", 8)
    content = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in IDS]
    assert len(content[0]["top_logprobs"]) == 2
    assert [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event] == [whole["prompt_logprobs"]]
    assert whole["prompt_logprobs"][0] is None
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": [1, 99999]}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"stop": "."}}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 999}}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "a"}}}, "sampling_params"),
        ({"token_ids": [1], "features": {"image": 1}}, "features"),
    ],
    ids=str,
)
def test_wrong_bodies_name_the_field(running: Running, body: dict[str, Any], field: str) -> None:
    answer = ask(running, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def test_there_are_no_other_routes_but_those_of_operators(running: Running) -> None:
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/tokenize",
        "/invocations",
        "/v1/responses",
    ):
        assert ask(running, path, prompt="x", messages=[]).status_code == 404
    for path in ("/", "/v1/models", "/page/app.js"):
        assert httpx.get(running.url + path, headers={"x-api-key": "k"}).status_code == 404
    for path in ("/health", "/metrics", "/load", "/version"):
        assert httpx.get(running.url + path, headers={"x-api-key": "k"}).status_code == 200
    assert httpx.post(f"{running.url}/inference/v1/generate", json={"token_ids": IDS}).status_code == 401
    document = httpx.get(f"{running.url}/openapi.json", headers={"x-api-key": "k"}).json()
    assert [path for path, methods in document["paths"].items() if "post" in methods] == ["/inference/v1/generate"]
