"""`frame serve` as a stranger types it: the demo model on this machine's CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import FAKE, REAL, Running, server, until

MESSAGES: list[Any] = [{"role": "user", "content": "Hello, how are you?"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(REAL, "--disable-access-log", "--enable-prompt-tokens-details", "--num-threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_start_up_shows_stages_and_where_it_serves(running: Running) -> None:
    for stage in ("libraries", "weights", "kv cache", "serving demo at http://127.0.0.1:"):
        running.until_said(stage)
    start = running.text.partition("serving demo at")[0].splitlines()
    assert len(start) <= 14, running.text  # an operator reads them
    assert all(len(line) <= 140 for line in start), running.text
    for choice in ("platform: cpu", "attention backend: torch"):
        assert sum(choice in line for line in start) == 1


def test_greedy_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=40)
    stream = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=40, stream=True)
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == answer.choices[0].message.content
    assert text.strip()
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_metrics_have_the_format_that_is_asked_for(running: Running) -> None:
    for accept, kind, end in (
        ("", "text/plain; version=0.0.4", ""),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "text/plain; version=0.0.4", ""),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
            "application/openmetrics-text; version=1.0.0",
            "# EOF\n",
        ),
    ):
        answer = httpx.get(f"{running.url}/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith(kind)
        assert "frame_num_requests_running" in answer.text
        assert answer.text.endswith(end)
        assert ("# EOF" in answer.text) == bool(end)


def test_seeds_and_logprobs(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        answer = client.completions.create(model="demo", prompt="Once", max_tokens=16, temperature=1, seed=seed)
        return answer.choices[0].text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1
    answer = client.completions.create(model="demo", prompt="Once", max_tokens=4, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    for best, drawn in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True):
        assert best is not None
        assert len(best) == 3
        assert max(best.values()) == drawn


def test_bias_forces_a_token(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    answer = client.completions.create(
        model="demo", prompt="Once", max_tokens=3, logit_bias={"300": 100}, temperature=0, extra_body=extra
    )
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == [300] * 3


def test_prefix_hits_are_reported(client: openai.OpenAI) -> None:
    prompt = "The little cat sat down. " * 20

    def cached(**extra: Any) -> int:
        usage = client.completions.create(model="demo", prompt=prompt, max_tokens=1, extra_body=extra).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    cached()
    assert cached() > 0
    assert cached(cache_salt="mine") == 0


def test_a_request_too_long_for_the_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model="demo", prompt=[5] * 5000)


def test_terminal_chat(running: Running) -> None:
    command = [sys.executable, "-m", "frame", "chat", "--url", running.url, "-q", "Hello", "--max-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.strip()


def test_token_ids_work_without_a_tokenizer() -> None:
    with server(FAKE, "--skip-tokenizer-init") as bare:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
        answer = httpx.post(f"{bare.url}/v1/completions", json=body).json()
        assert len(answer["choices"][0]["token_ids"]) == 4
        shown = httpx.post(f"{bare.url}/v1/completions", json={**body, "logprobs": 1}).json()
        assert shown["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        for path, fields in (
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/completions", {"prompt": [5], "echo": True}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/tokenize", {"prompt": "x"}),
        ):
            response = httpx.post(bare.url + path, json=fields)
            assert response.status_code == 400, (fields, response.text)
            assert "tokenizer" in response.json()["error"]["message"]
        until(lambda: "POST /v1/completions" in bare.text)
