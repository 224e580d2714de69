from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frame.interfaces import RequestError
from frame.plugins.endpoints.responses_store import ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(name: str, status: str = "completed", owner: str = "me", text: str = "", **fields: Any) -> StoredResponse:
    response = {"id": name, "status": status, "background": False, "output": [text], **fields}
    return StoredResponse(owner, response, [], [])


def store(clock: Clock | None = None, **bounds: Any) -> ResponseStore:
    values = {"max_responses": 3, "max_bytes": 10_000, "max_running": 2, "ttl_seconds": 60.0, **bounds}
    return ResponseStore(**values, clock=clock or Clock())


def test_the_oldest_go_first() -> None:
    kept = store()
    for name in "abcde":
        kept.add(stored(name))
    assert len(kept) == 3
    for name in "ab":
        with pytest.raises(RequestError, match=f"no response '{name}'"):
            kept.get(name, "me")
    assert kept.get("e", "me").response["id"] == "e"


def test_bytes_are_bounded_and_given_back() -> None:
    kept = store(max_responses=100)
    for number in range(20):
        kept.add(stored(str(number), text="x" * 2000))
    assert len(kept) < 6
    assert kept.num_bytes <= 10_000
    for number in range(20):
        kept.drop(stored(str(number)))
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_time_is_bounded() -> None:
    clock = Clock()
    kept = store(clock)
    kept.add(stored("a"))
    clock.now = 59
    assert kept.get("a", "me")
    clock.now = 61
    with pytest.raises(RequestError):
        kept.get("a", "me")
    assert kept.num_bytes == 0


def test_what_is_being_made_is_neither_dropped_nor_without_bound() -> None:
    clock = Clock()
    kept = store(clock, max_responses=1)
    for name in "ab":
        kept.add(stored(name, "in_progress", background=True))
    with pytest.raises(RequestError) as caught:
        kept.add(stored("c", "queued", background=True))
    assert caught.value.status == 429
    kept.add(stored("d"))
    clock.now = 1000
    assert kept.get("a", "me").running
    kept.get("a", "me").response["status"] = "completed"
    with pytest.raises(RequestError):
        kept.get("a", "me")


def test_others_learn_nothing() -> None:
    kept = store()
    kept.add(stored("a"))
    messages = []
    for name, owner in (("a", "you"), ("a", ""), ("b", "me")):
        with pytest.raises(RequestError) as caught:
            kept.get(name, owner)
        messages.append((caught.value.status, caught.value.message.replace(name, "?")))
    assert len(set(messages)) == 1


async def test_followers_see_everything_once() -> None:
    one = stored("a", "in_progress")
    one.record(b"0")

    async def follow(start: int) -> list[bytes]:
        return [frame async for frame in one.follow(start)]

    followers = [asyncio.create_task(follow(start)) for start in (0, 1, 5)]
    for number in (1, 2):
        await asyncio.sleep(0)
        one.record(b"%d" % number)
    one.response["status"] = "completed"
    one.notify()
    async with asyncio.timeout(10):
        assert await asyncio.gather(*followers) == [[b"0", b"1", b"2"], [b"1", b"2"], []]


def test_an_id_that_a_client_chose_is_its_own_alone() -> None:
    kept = store()
    first, other, second = stored("a"), stored("a", owner="other", text="x" * 100), stored("a", text="y")
    for each in (first, other, second):
        kept.add(each)
    assert kept.get("a", "me") is second
    assert kept.get("a", "other") is other
    assert kept.num_bytes == second.num_bytes + other.num_bytes
    kept.settle(first)  # it was still being generated when the second came
    assert kept.num_bytes == second.num_bytes + other.num_bytes


def test_nobody_crowds_out_the_others() -> None:
    kept = store()
    kept.add(stored("mine"))
    for name in "abcdef":
        kept.add(stored(name, owner="other"))
    assert kept.get("mine", "me")
    assert len(kept) == 3
    assert all(kept.get(name, "other") for name in "ef")
    kept = store(max_responses=100)
    kept.add(stored("mine"))
    for name in "abcdef":
        kept.add(stored(name, owner="other", text="x" * 4000))
    assert kept.get("mine", "me")
    assert kept.num_bytes <= 10_000
