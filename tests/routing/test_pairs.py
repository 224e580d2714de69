"""A prompt computed on one server and answered by another: what each is asked, and what happens when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from frame.interfaces import Route, RoutePolicy, RouteRequest, RouteServer, Setup
from tests.routing.fakes import CHAT, Behaviour, FakeServer, Fronted, Seen, die, front, reply, servers, stream

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2], [3]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "request-p",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
COMPUTED = reply(200, {"choices": [], "kv_transfer_params": PARAMS})
BODY = (
    b'{ "messages": [{"role": "user", "content": "\\u00e9 1.0"}], "max_tokens": 50, "min_tokens": 5,\n '
    b'"stream": true, "stream_options": {"include_usage": true}, "temperature": 1.0}'
)
JSON = {"Content-Type": "application/json"}


@contextlib.asynccontextmanager
async def pairs(
    decodes: Sequence[Behaviour], prefills: Sequence[Behaviour], *arguments: str
) -> AsyncIterator[tuple[list[FakeServer], list[FakeServer], Fronted]]:
    async with servers(*decodes, *prefills) as made:
        ours, theirs = made[: len(decodes)], made[len(decodes) :]
        options = ("--prefill", *(server.url for server in theirs), "--policy", "round-robin", *arguments)
        async with front(*(server.url for server in ours), *options) as fronted:
            yield ours, theirs, fronted


async def test_each_is_asked_what_proxies_of_vllm_ask() -> None:
    async with pairs([stream(b"data: 1\n\n")], [COMPUTED]) as ((d,), (p,), f):
        answer = await f.client.post(CHAT, content=BODY, headers={**JSON, "Authorization": "Bearer k"})
        assert answer.content == b"data: 1\n\n"
        (first,), (second,) = p.seen, d.seen
        wanted = json.loads(BODY) | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASKED}
        del wanted["stream_options"], wanted["min_tokens"]
        assert first.json == wanted
        assert second.json == json.loads(BODY) | {"kv_transfer_params": PARAMS}
        assert second.body.endswith(BODY[1:])  # the client's bytes
        assert first.target == second.target == CHAT
        assert first.header("x-request-id") == second.header("x-request-id") != None  # noqa: E711
        assert first.header("authorization") == second.header("authorization") == "Bearer k"
        assert [server.prefills for server in f.fleet.servers] == [0, 1]
        assert all(server.in_flight == 0 for server in f.fleet.servers)


async def test_a_clients_request_id_stays() -> None:
    async with pairs([reply(200)], [COMPUTED]) as ((d,), (p,), f):
        await f.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "mine"})
        assert d.seen[0].header("x-request-id") == p.seen[0].header("x-request-id") == "mine"
        assert p.seen[0].json == {"prompt": "x", "max_tokens": 1, "stream": False, "kv_transfer_params": ASKED}


async def test_other_bounds_of_a_chat_are_one_too() -> None:
    async with pairs([reply(200)], [COMPUTED]) as ((_,), (p,), f):
        await f.client.post(CHAT, json={"messages": [], "max_completion_tokens": 9})
        assert p.seen[0].json["max_completion_tokens"] == p.seen[0].json["max_tokens"] == 1


async def test_a_prompt_is_computed_once_for_several_outputs() -> None:
    async with pairs([reply(200)], [COMPUTED]) as ((d,), (p,), f):
        for prompt in ("x", ["x"], [1, 2]):
            await f.client.post("/v1/completions", json={"prompt": prompt, "n": 3, "best_of": 4})
            asked = {"prompt": prompt, "max_tokens": 1, "stream": False, "kv_transfer_params": ASKED}
            assert p.seen[-1].json == asked
            assert (d.seen[-1].json["n"], d.seen[-1].json["best_of"]) == (3, 4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", None),
        ("/v1/messages", {"messages": []}),
        ("/v1/embeddings", {"input": "x"}),
        (CHAT, {"messages": [], "kv_transfer_params": None}),
        (CHAT, []),
        ("/v1/completions", {"prompt": ["one", "two"]}),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}),
    ],
)
async def test_other_requests_go_to_the_server_that_answers(path: str, body: Any) -> None:
    async with pairs([reply(200, {"from": "d"})], [COMPUTED]) as ((_,), (p,), f):
        answer = await f.client.request("GET" if body is None else "POST", path, json=body)
        assert answer.json() == {"from": "d"}
        assert p.seen == []


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "DELETE"])
async def test_only_what_is_posted_is_divided(method: str) -> None:
    async with pairs([reply(200, {"from": "d"})], [COMPUTED]) as ((d,), (p,), f):
        assert (await f.client.request(method, CHAT, content=BODY, headers=JSON)).json() == {"from": "d"}
        assert (d.seen[0].body, p.seen) == (BODY, [])


@pytest.mark.parametrize(
    "given",
    [
        reply(200, {"choices": []}),
        reply(200, {"kv_transfer_params": None}),
        reply(200, {"kv_transfer_params": [1]}),
        reply(200, b"no json"),
        reply(200, b"[" * 5000),
        reply(200, []),
        reply(400, {"error": {"message": "no such field"}}),
        reply(429),
    ],
)
async def test_without_a_place_of_the_kv_the_request_goes_on_as_it_is(given: Behaviour) -> None:
    async with pairs([reply(200, {"from": "d"})], [given, COMPUTED]) as ((d,), (_, other), f):
        assert (await f.client.post(CHAT, content=BODY, headers=JSON)).json() == {"from": "d"}
        assert d.seen[0].body == BODY
        assert other.seen == []


async def test_prompts_that_are_computed_twice_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """So are those of a server that was started without a connector."""
    answers = [reply(200, {"choices": []}), reply(200, {"choices": []}), COMPUTED, reply(200, {"choices": []})]

    async def prefill(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await answers.pop(0)(seen, writer)

    async with pairs([reply(200)], [prefill]) as ((_,), (p,), f):
        for _ in range(4):
            await f.client.post(CHAT, content=BODY, headers=JSON)
        assert [(server.prefills, server.prefills_without_kv) for server in f.fleet.servers] == [(0, 0), (4, 3)]
        assert [server["prefills_without_kv"] for server in (await f.client.get("/fleet")).json()["servers"]] == [0, 3]
        metrics = (await f.client.get("/metrics")).text
        assert f'frame_route_prefills_without_kv_total{{server="{p.url}"}} 3.0' in metrics
    (said,) = [record.getMessage() for record in caplog.records if "kv_transfer_params" in record.getMessage()]
    assert said.startswith(f"{p.url} has computed a prompt and not said by kv_transfer_params where its KV is")
    assert "--kv-connector" in said


async def test_nothing_is_said_of_a_server_that_hands_kv_over(caplog: pytest.LogCaptureFixture) -> None:
    answers = [COMPUTED, reply(200, {"choices": []})]

    async def prefill(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await answers.pop(0)(seen, writer)

    async with pairs([reply(200)], [prefill]) as ((_,), (_,), f):
        for _ in range(2):
            await f.client.post(CHAT, content=BODY, headers=JSON)
        assert [server.prefills_without_kv for server in f.fleet.servers] == [0, 1]
    assert not [record for record in caplog.records if "kv_transfer_params" in record.getMessage()]


@pytest.mark.parametrize("given", [die, reply(500), reply(503)])
async def test_a_prefill_that_fails_is_done_by_another_one(given: Behaviour) -> None:
    async with pairs([reply(200)], [given, COMPUTED]) as ((d,), (first, second), f):
        assert (await f.client.post(CHAT, content=BODY, headers=JSON)).status_code == 200
        assert (len(first.seen), len(second.seen)) == (1, 1)
        assert d.seen[0].json["kv_transfer_params"] == PARAMS


async def test_when_all_prefills_fail_the_other_one_computes_the_prompt() -> None:
    async with pairs([reply(200)], [die, die]) as ((d,), made, f):
        assert (await f.client.post(CHAT, content=BODY, headers=JSON)).status_code == 200
        assert [len(server.seen) for server in made] == [1, 1]
        assert d.seen[0].body == BODY


async def test_a_request_by_which_servers_die_ends_three_at_most() -> None:
    async with pairs([die, die], [die, die, die], "--max-retries", "1") as (decodes, prefills, f):
        assert (await f.client.post(CHAT, content=BODY, headers=JSON)).status_code == 502
        assert [sum(len(server.seen) for server in made) for made in (decodes, prefills)] == [1, 2]


async def test_without_a_ready_prefill_the_other_one_computes_the_prompt() -> None:
    async with pairs([reply(200)], [COMPUTED]) as ((d,), (p,), f):
        await p.stop()
        await f.watch.look()
        assert (await f.client.post(CHAT, content=BODY, headers=JSON)).status_code == 200
        assert d.seen[0].body == BODY


async def test_a_decode_that_fails_is_done_by_another_one_with_the_same_kv() -> None:
    async with pairs([die, reply(200, {"from": "second"})], [COMPUTED]) as (made, (p,), f):
        assert (await f.client.post(CHAT, content=BODY, headers=JSON)).json() == {"from": "second"}
        assert [server.seen[0].json["kv_transfer_params"] for server in made] == [PARAMS, PARAMS]
        assert len(p.seen) == 1


async def test_a_client_that_leaves_ends_the_prefill() -> None:
    async def never(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with pairs([reply(200)], [never]) as ((d,), (p,), f):
        asked = asyncio.create_task(f.client.post(CHAT, content=BODY, headers=JSON))
        async with asyncio.timeout(60):
            while not p.seen:
                await asyncio.sleep(0.01)
        assert [server.in_flight for server in f.fleet.servers] == [1, 1]
        asked.cancel()
        async with asyncio.timeout(60):
            await p.left.wait()
            while any(server.in_flight for server in f.fleet.servers):
                await asyncio.sleep(0.01)
        assert d.seen == []


async def test_short_requests_are_not_worth_it_for_pairs() -> None:
    async with servers(reply(200), COMPUTED) as (d, p):
        arguments = (d.url, "--prefill", p.url, "--policy", "pairs", "--plugin.pairs.min-body-bytes", "1000")
        async with front(*arguments) as f:
            for content in ("x", "x" * 2000):
                await f.client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})
            assert (len(d.seen), len(p.seen)) == (2, 1)


class OwnPair(RoutePolicy):
    """Both of a request by the same number."""

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        return servers[0]

    def route(self, request: RouteRequest, servers: Sequence[RouteServer], prefills: Sequence[RouteServer]) -> Route:
        place = int((request.content or {}).get("place", 0))
        return Route(servers[place], prefills[place] if prefills else None)


async def test_a_policy_chooses_both_together() -> None:
    async with servers(reply(200), reply(200), COMPUTED, COMPUTED) as made:
        urls = [server.url for server in made]
        async with front(*urls[:2], "--prefill", *urls[2:], policy=OwnPair(Setup())) as f:
            for place in (0, 1, 1):
                await f.client.post(CHAT, json={"place": place})
            assert [len(server.seen) for server in made] == [1, 2, 1, 2]
