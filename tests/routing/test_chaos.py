"""Servers that fail at random: every request gets one whole answer, or an end that says so; nothing is left over."""

from __future__ import annotations

import asyncio
import json
import random
from array import array

import httpx
import pytest

from frame.interfaces import KVStored, RoutePolicy, Setup
from frame.plugins.routing.least_load import LeastLoadPolicy
from frame.plugins.routing.prefix import PrefixPolicy
from frame.plugins.routing.text_prefix import TextPrefixPolicy
from tests.routing.fakes import CHAT, Behaviour, Seen, die, front, reply, servers, stream


def events(name: str) -> list[bytes]:
    return [b'data: {"of": "%b", "n": %d}\n\n' % (name.encode(), number) for number in range(4)]


def moody(draw: random.Random) -> Behaviour:
    """Answers, refuses, dies before, in, or after the head, or between two events."""

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        name = seen.json.get("name", "tokens")
        await asyncio.sleep(draw.random() * 0.003)
        kind = draw.choice(("whole", "whole", "die", "refuse", "late", "head", "odd"))
        if kind == "die":
            await die(seen, writer)
        elif kind == "refuse":
            await reply(503)(seen, writer)
        elif kind == "head":
            await stream(end=False)(seen, writer)
        elif kind == "late":
            await stream(*events(name)[: draw.randint(1, 3)], end=False)(seen, writer)
        elif kind == "odd":
            writer.write(b"no HTTP at all\r\n\r\n")
        else:
            await stream(*events(name))(seen, writer)

    return answer


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("seed", "policy"), [(0, LeastLoadPolicy), (1, LeastLoadPolicy), (2, TextPrefixPolicy), (3, PrefixPolicy)]
)
async def test_every_request_ends_once(seed: int, policy: type[RoutePolicy]) -> None:
    draw = random.Random(seed)
    prefill = reply(200, {"kv_transfer_params": {"remote_engine_id": "p"}})
    async with servers(*(moody(draw) for _ in range(3)), prefill, die) as made:
        urls = [server.url for server in made]
        made_policy = policy(Setup())
        for url in urls[:2]:
            made_policy.kv_changed(url, 0, KVStored([1], None, array("I", range(16)), 16))
        options = ("--prefill", *urls[3:], "--max-retries", "3")
        async with front(*urls[:3], *options, policy=made_policy) as f:
            watching = asyncio.create_task(f.watch.run())
            answers = await asyncio.gather(*(ask(f.client, f"{seed}-{number}", draw) for number in range(150)))
            watching.cancel()
            assert all(server.in_flight == 0 for server in f.fleet.servers)
            assert f.forwarding.active == 0
    kinds = {kind: answers.count(kind) for kind in set(answers)}
    assert kinds["whole"] > 40, kinds
    assert set(kinds) <= {"whole", "broken", "left", "502", "503"}


async def ask(client: httpx.AsyncClient, name: str, draw: random.Random) -> str:
    """How the request ends; checks that its events are its own, in order, and each there once."""
    await asyncio.sleep(draw.random())
    message = {"role": "user", "content": name[-1] * draw.choice((10, 9000))}
    body = {"name": name, "messages": [message], "stream": True}
    async with client.stream("POST", CHAT, json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return str(answer.status_code)
        if draw.random() < 0.1:
            return "left"
        content = await answer.aread()
    parts = [part + b"\n\n" for part in content.split(b"\n\n")[:-1]]
    if parts == events(name):
        return "whole"
    assert parts[:-1] == events(name)[: len(parts) - 1]
    assert json.loads(parts[-1].removeprefix(b"data: "))["error"]["message"] == "the server broke off its answer"
    return "broken"
