"""What operators of shared servers ask for: API keys that share no cached prefix, whatever route they ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import ValidationError

from frame.core.config.server import ServerConfig
from frame.core.server.key_salt import key_salt
from tests.server.running import FAKE, Running, server

KEYS = ("first", "second")
LONG = "it was a dark and stormy night"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(
        FAKE, "--api-key", KEYS[0], "--api-key", KEYS[1], "--cache-salt-per-key", "--enable-prompt-tokens-details",
        "--plugin.fake.caches", "true", "--plugin.fake.vocab_size", "2048",
    ) as running:  # fmt: skip
        yield running


def cached(usage: Any) -> int:
    details = usage.prompt_tokens_details
    assert details is not None
    return int(details.cached_tokens)


def completion(url: str, key: str, **fields: Any) -> int:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        answer = client.completions.create(model="demo", prompt=f"One: {LONG}", max_tokens=1, **fields)
    return cached(answer.usage)


def chat(url: str, key: str, **fields: Any) -> int:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": f"Two: {LONG}"}]
        answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=1, **fields)
    return cached(answer.usage)


def response(url: str, key: str) -> int:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        answer = client.responses.create(model="demo", input=f"Three: {LONG}", max_output_tokens=1)
    assert answer.usage is not None
    return answer.usage.input_tokens_details.cached_tokens


def message(url: str, key: str) -> int:
    with Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": f"Four: {LONG}"}]
        answer = client.messages.create(model="demo", max_tokens=1, messages=messages)
    return answer.usage.cache_read_input_tokens or 0


@pytest.mark.parametrize("ask", [completion, chat, response, message], ids=lambda ask: str(ask.__name__))
def test_no_key_finds_what_another_has_sent(running: Running, ask: Callable[[str, str], int]) -> None:
    first, second = KEYS
    ask(running.url, first)
    shared = ask(running.url, first)
    assert shared > 0
    assert ask(running.url, second) == 0
    assert ask(running.url, second) == shared


def test_a_salt_of_the_request_counts_within_its_key(running: Running) -> None:
    extra = {"cache_salt": "mine"}
    assert completion(running.url, KEYS[0], extra_body=extra) == 0
    assert completion(running.url, KEYS[0], extra_body=extra) > 0
    assert completion(running.url, KEYS[1], extra_body=extra) == 0


def test_salts_differ_by_key_and_by_what_is_asked_for() -> None:
    salts = [key_salt(owner, given) for owner in ("a", "b", "") for given in (None, "", "a", "b")]
    assert len(set(salts)) == len(salts)
    assert key_salt("a", "b") == key_salt("a", "b")
    assert key_salt("a", None) == "77825e0ce18f82bfd60180c391b9c48c9204476eb7998b595ddda99ca23a188b"


def test_it_needs_keys() -> None:
    with pytest.raises(ValidationError, match="cache_salt_per_key needs api_key"):
        ServerConfig(cache_salt_per_key=True)
