"""The policy `prefix` before two processes of `frame serve`, whose events say what they have cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.kv_events.listening import free_ports
from tests.routing.running import RunningFront, route
from tests.server.running import REAL, Running, server, until

SEA = "Tell me all that you know about the sea, its depths, its tides and those who live in it. " * 6
HILL = "What grows on a hill in spring, and who walks there when the snow has gone? Say it in verse. " * 6


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[list[Running], list[str]]]:
    """One publishes arrays, the other one maps."""
    port = free_ports(4)
    where = [f"tcp://127.0.0.1:{port + place}" for place in range(4)]
    own = [
        (
            "--kv-events-endpoint",
            where[place],
            "--kv-events-replay-endpoint",
            where[place + 2],
            "--kv-events-format",
            form,
        )
        for place, form in enumerate(("array", "map"))
    ]
    common = ("--num-threads", "1")
    with server(REAL, *common, *own[0]) as first, server(REAL, *common, *own[1]) as second:
        yield [first, second], where


@pytest.fixture
def front(both: tuple[list[Running], list[str]]) -> Iterator[RunningFront]:
    (first, second), where = both
    events = ("--kv-events", *where[:2], "--kv-events-replay", *where[2:])
    with route(first.url, second.url, *events, "--policy", "prefix", "--plugin.prefix.min-body-bytes", "0") as running:
        yield running


def chat(url: str, text: str, **fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200


def answers(front: RunningFront) -> list[int]:
    return [one["answers"]["2xx"] for one in httpx.get(f"{front.url}/fleet").json()["servers"]]


def figures(front: RunningFront) -> dict[str, float]:
    found: dict[str, float] = httpx.get(f"{front.url}/fleet").json()["figures"]
    return found


def test_prompts_go_where_they_are_cached_also_those_that_came_by_other_ways(
    both: tuple[list[Running], list[str]], front: RunningFront
) -> None:
    first, second = both[0]
    chat(first.url, SEA)
    chat(second.url, HILL)
    until(lambda: figures(front)["cached_blocks"] >= 16, 20, lambda: f"{figures(front)} {front.text}")
    for text, place in ((SEA, 0), (HILL, 1), (HILL, 1), (SEA, 0), (SEA + "And the moon?", 0)):
        before, known = answers(front), figures(front)["known_tokens"]
        chat(front.url, text)
        after = answers(front)
        # asking for tokens counts as an answer of neither
        assert [new - old for new, old in zip(after, before, strict=True)] == [int(place == at) for at in range(2)]
        assert figures(front)["known_tokens"] - known >= 96
    known = figures(front)["known_tokens"]
    chat(front.url, SEA, cache_salt="mine")
    assert figures(front)["known_tokens"] == known
    answer = httpx.post(f"{first.url}/tokenize", json={"prompt": SEA})
    body = {"prompt": answer.json()["tokens"], "max_tokens": 1}
    assert httpx.post(f"{front.url}/v1/completions", json=body, timeout=60).status_code == 200
