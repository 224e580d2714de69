"""The policies by prefixes, before servers in this process that tokenise as frame and vLLM do."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import pytest

from frame.interfaces import KVCleared, KVStored, RouteRequest, Setup
from frame.plugins.routing.prefix import PrefixPolicy
from frame.plugins.routing.prefix_options import PrefixOptions
from frame.plugins.routing.prompt_text import piece_keys, prompt_bytes
from frame.plugins.routing.text_prefix import SentTexts, TextPrefixPolicy
from frame.plugins.routing.text_prefix_options import TextPrefixOptions
from frame.plugins.routing.tokenized_texts import TokenizedTexts
from frame.plugins.routing.tokenizing import given_tokens, tokenize_body
from frame.testing.route_policy_suite import FakeRouteServer
from tests.routing.fakes import CHAT, Behaviour, FakeServer, Seen, front, reply, servers

LONG = "All work and no play makes a dull day. " * 40


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "model": "demo",
        "messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)],
        **fields,
    }


def request(body: dict[str, Any], path: str = CHAT) -> RouteRequest:
    return RouteRequest(path, json.dumps(body).encode())


def fakes(count: int = 3) -> list[FakeRouteServer]:
    return [FakeRouteServer(f"http://{place}") for place in range(count)]


def text_policy(**options: Any) -> TextPrefixPolicy:
    return TextPrefixPolicy(Setup(), TextPrefixOptions(**options))


def test_conversations_stay_where_they_began() -> None:
    policy, there = text_policy(), fakes()
    turns = [[f"{place} {LONG}"] for place in range(6)]
    homes = [policy.choose(request(chat(*texts)), there).url for texts in turns]
    assert sorted(homes) == sorted([server.url for server in there] * 2)
    for _ in range(3):
        for texts, home in zip(turns, homes, strict=True):
            texts += [LONG[:300], LONG[:200]]
            assert policy.choose(request(chat(*texts, temperature=0.5, stream=True)), there).url == home


def test_load_weighs_against_a_prefix() -> None:
    policy, there = text_policy(load_tokens=100), fakes(2)
    home = policy.choose(request(chat(LONG)), there)  # some 390 tokens
    assert isinstance(home, FakeRouteServer)
    home.in_flight = 3
    assert policy.choose(request(chat(LONG)), there) is home
    home.in_flight = 5
    assert policy.choose(request(chat(LONG)), there) is not home


def test_short_and_odd_requests_go_to_the_least_load() -> None:
    policy, there = text_policy(), fakes()
    there[0].in_flight = there[2].num_other = 1
    for body in (chat("x"), {"messages": 5}, {"prompt": None}, {"input": [[1, 2]]}, {}):
        assert policy.choose(request(body), there) is there[1]
    assert policy.choose(RouteRequest(CHAT, b'{"prompt": "\\ud800' + b"x" * 999 + b'"}'), there) is there[1]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (chat(LONG), chat(LONG, "more", temperature=1), True),
        (chat(LONG), chat(LONG) | {"model": "poet"}, False),
        (chat(LONG), chat(LONG, cache_salt="x"), False),
        (chat(LONG, tools=[{"name": "a"}]), chat(LONG, tools=[{"name": "b"}]), False),
        ({"prompt": LONG}, {"prompt": LONG + "x", "max_tokens": 3}, True),
        ({"prompt": list(range(999))}, {"prompt": list(range(1005))}, True),
        ({"system": LONG, "messages": [1]}, {"system": LONG, "messages": [2]}, True),
        ({"input": LONG}, {"input": LONG, "instructions": LONG}, False),
    ],
)
def test_prompts_begin_alike_where_their_bytes_do(one: Any, other: Any, alike: bool) -> None:
    first, second = prompt_bytes(one), prompt_bytes(other)
    assert (first[:1000] == second[:1000]) is alike


async def test_bodies_that_take_long_to_read_are_not_read() -> None:
    policy, there = prefix_policy(), fakes()
    there[0].in_flight = there[2].in_flight = 1
    policy.kv_changed(there[0].url, 0, stored(LONG))
    large = request(chat("x" * (3 << 20)))
    for _ in range(2):
        await policy.prepare(large, there, never)
        assert policy.choose(large, there) is there[1]
    assert "_parsed" not in vars(large)
    assert policy.figures()["text_pieces"] == 0


async def never(*_: Any) -> bytes | None:
    raise AssertionError("nobody is to be asked")


def test_what_was_sent_is_forgotten_as_a_cache_forgets() -> None:
    texts = SentTexts(4)
    texts.sent([1, 2, 3], "a")
    texts.sent([1, 4, 5], "a")
    assert texts.known([1, 2, 3], ["a", "b"]) == {"a": 2}, "the beginning is kept longest"
    texts.sent(list(range(10, 30)), "a")
    assert (texts.known([1], ["a"]), len(texts)) == ({"a": 0}, 4)
    for number in range(3000):
        texts.sent([number], f"http://{number}")
    assert len(texts) <= 256 * 4
    assert len(texts._servers) <= 256


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def stored(text: str, size: int = 16) -> KVStored:
    tokens = tokens_of(text)
    count = len(tokens) // size
    return KVStored(list(range(count)), None, array("I", tokens[: count * size]), size)


async def tokenizing(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Answers as a server of chats whose template adds nothing."""
    if seen.target == "/tokenize":
        text = "".join(one["content"] for one in seen.json["messages"])
        await reply(200, {"count": len(text), "max_model_len": 9, "tokens": tokens_of(text)})(seen, writer)
    else:
        await reply(200, {"ok": True})(seen, writer)


def answered(server: FakeServer) -> list[Seen]:
    return [seen for seen in server.seen if seen.target != "/tokenize"]


def prefix_policy(**options: Any) -> PrefixPolicy:
    return PrefixPolicy(Setup(), PrefixOptions(**options))


async def test_a_server_is_asked_for_tokens_with_the_clients_key_and_the_holder_gets_the_request() -> None:
    policy = prefix_policy()
    async with servers(*[tokenizing] * 3) as made, front(*(one.url for one in made), policy=policy) as f:
        policy.kv_changed(made[1].url, 0, stored(LONG))
        policy.kv_changed(made[2].url, 0, stored(LONG[:400]))
        for place in range(4):
            body = chat(LONG, "more", tools=[{"x": 1}], temperature=0.1 * place)
            answer = await f.client.post(CHAT, json=body, headers={"Authorization": "Bearer mine"})
            assert answer.json() == {"ok": True}
        assert [len(answered(one)) for one in made] == [0, 4, 0]
        asked = [seen for one in made for seen in one.seen if seen.target == "/tokenize"]
        assert len(asked) == 1, "one prompt is tokenised once"
        assert {seen.header("authorization") for seen in asked} == {"Bearer mine"}
        assert asked[0].json == {
            name: chat(LONG, "more", tools=[{"x": 1}])[name] for name in ("model", "messages", "tools")
        }
        figures = (await f.client.get("/fleet")).json()["figures"]
        assert 0.85 < figures["known_tokens"] / (4 * len(LONG)) <= 1
        text = (await f.client.get("/metrics")).text
        assert f'frame_route_policy{{figure="cached_blocks"}} {len(LONG) // 16}' in text.replace(".0\n", "\n")


@pytest.mark.parametrize(
    "behave",
    [
        reply(404),
        reply(200, {"tokens": "x"}),
        reply(200, {"tokens": [-1]}),
        reply(200, b"[" * 9999),
        reply(200, b"\xff"),
    ],
)
async def test_servers_that_do_not_say_tokens_are_not_asked_again_at_once(behave: Behaviour) -> None:
    async def act(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await (behave if seen.target == "/tokenize" else reply(200, {"ok": True}))(seen, writer)

    policy = prefix_policy()
    async with servers(act, act) as made, front(*(one.url for one in made), policy=policy) as f:
        policy.kv_changed(made[1].url, 0, stored(LONG))
        for _ in range(6):
            assert (await f.client.post(CHAT, json=chat(LONG))).json() == {"ok": True}
        assert sum(len(one.seen) - len(answered(one)) for one in made) == 2
        # what was sent decides then
        assert sorted(len(answered(one)) for one in made) == [0, 6]


async def test_a_server_that_is_slow_to_say_tokens_holds_a_request_up_for_a_bounded_time() -> None:
    async def act(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.target == "/tokenize":
            await asyncio.sleep(600)
        await reply(200, {"ok": True})(seen, writer)

    policy = prefix_policy(tokenize_seconds=0.1)
    async with servers(act, act) as made, front(*(one.url for one in made), policy=policy) as f:
        policy.kv_changed(made[1].url, 0, stored(LONG))
        async with asyncio.timeout(60):
            assert (await f.client.post(CHAT, json=chat(LONG))).json() == {"ok": True}


async def test_nobody_is_asked_where_it_cannot_pay() -> None:
    async with servers(tokenizing, tokenizing) as made:
        policy = prefix_policy()
        async with front(*(one.url for one in made), policy=policy) as f:
            await f.client.post(CHAT, json=chat(LONG))  # nothing is known of anybody
            policy.kv_changed(made[0].url, 0, stored(LONG))
            await f.client.post(CHAT, json=chat("short"))
            picture = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}
            await f.client.post(CHAT, json={"messages": [{"role": "user", "content": [picture], "name": LONG}]})
            await f.client.post("/v1/embeddings", json={"input": LONG})
            await f.client.post("/v1/completions", json={"prompt": tokens_of(LONG)})
            await f.client.get("/v1/models")
            policy.kv_changed(made[0].url, 0, KVCleared())
            await f.client.post(CHAT, json=chat(LONG))
        async with front(made[0].url, policy=policy) as f:
            policy.kv_changed(made[0].url, 0, stored(LONG))
            await f.client.post(CHAT, json=chat(LONG))
        assert all(seen.target != "/tokenize" for one in made for seen in one.seen)


async def test_the_next_turn_of_a_conversation_is_not_tokenised() -> None:
    policy = prefix_policy()
    async with servers(*[tokenizing] * 2) as made, front(*(one.url for one in made), policy=policy) as f:
        policy.kv_changed(made[1].url, 0, stored(LONG))
        turns, counts = [LONG], []
        for place in range(12):
            await f.client.post(CHAT, json=chat(*turns))
            turns += [f"{place} {LONG[:300]}", f"{LONG[:200]} {place}"]
            counts.append(sum(len(one.seen) - len(answered(one)) for one in made))
        assert [len(answered(one)) for one in made] == [0, 12]
        assert counts[0] == counts[2] == 1
        assert counts[-1] <= 4


def test_what_is_known_of_a_prompt_are_the_tokens_of_its_beginning() -> None:
    texts, data = TokenizedTexts(100_000), prompt_bytes(chat(LONG))
    tokens = list(range(1000, 1000 + len(data) // 4))
    texts.remember(piece_keys(data), len(data), tokens)
    longer = prompt_bytes(chat(LONG, LONG[:400]))
    found = texts.recall(piece_keys(longer), len(longer))
    assert found is not None
    found, beginning = found
    known = [token for token in found if token]
    assert known == tokens[: len(known)]
    assert beginning.num_tokens == len(known)
    assert len(tokens) * 0.8 < len(known) < len(tokens)
    assert abs(len(found) - len(longer) / 4) < 20
    for other in (chat(LONG, LONG, LONG), chat("x" + LONG), chat(LONG) | {"model": "poet"}, chat("x")):
        assert texts.recall(piece_keys(prompt_bytes(other)), len(prompt_bytes(other))) is None


def test_remembered_tokens_are_bounded_whatever_servers_say() -> None:
    texts = TokenizedTexts(10_000)
    for place in range(3000):
        data = b"%d" % place + b"x" * 5000
        texts.remember(piece_keys(data), len(data), [] if place % 2 else range(2000))
    assert len(texts) < 30
    assert len(texts._newest) < 600
    texts.remember(piece_keys(data), len(data), range(20_000))
    assert (len(texts), len(texts._newest), texts._num_tokens) == (0, 0, 0)
    assert texts.recall(piece_keys(data), len(data)) is None


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"prompt": [1, 2]}, [1, 2]),
        ({"prompt": [[1, 2]]}, [1, 2]),
        ({"input_ids": [1]}, [1]),
        ({"prompt": [[1], [2]]}, None),
        ({"prompt": [1.5, 2]}, None),
        ({"prompt": [-1]}, None),
        ({"prompt": [1 << 32]}, None),
        ({"prompt": "x"}, None),
        ({"prompt": []}, None),
    ],
)
def test_ids_that_a_client_sends_are_taken_as_they_are(content: Any, found: Any) -> None:
    tokens = given_tokens(content)
    assert (tokens if tokens is None else list(tokens)) == found


def test_what_is_asked_for_completions() -> None:
    body = tokenize_body("/v1/completions", {"prompt": ["x"], "model": "m", "max_tokens": 3})
    assert json.loads(body or b"") == {"prompt": "x", "model": "m"}
    assert tokenize_body("/v1/completions", {"prompt": ["x", "y"]}) is None
    assert tokenize_body("/v1/completions", {"prompt": "x" * (1 << 21)}) is None
    assert tokenize_body("/v1/messages", chat("x")) is None


def test_load_weighs_against_what_is_cached_and_unready_servers_are_left_out() -> None:
    policy, there = prefix_policy(load_tokens=100), fakes(2)
    policy.kv_changed(there[0].url, 0, stored(LONG[:320]))
    asked = request(chat(LONG))
    asked.tokens = tokens_of(LONG)
    assert policy.choose(asked, there) is there[0]
    there[0].in_flight = 4
    assert policy.choose(asked, there) is there[1]
    there[0].in_flight = 3
    assert policy.choose(asked, there) is there[0]
    assert policy.choose(asked, there[1:]) is there[1]


def test_what_is_left_of_a_prompt_decides_whether_it_is_divided() -> None:
    there, others = fakes(2), [FakeRouteServer("http://p", "prefill")]
    for policy in (text_policy(min_prefill_tokens=200), prefix_policy(min_prefill_tokens=200)):
        asked = request(chat(LONG))  # some 390 tokens
        first = policy.route(asked, there, others)
        assert first.prefill is others[0]
        assert policy.route(asked, there, []).prefill is None
        again = policy.route(asked, there, others)
        assert (again.server, again.prefill) == (first.server, None)
        assert policy.route(request(chat(LONG, LONG)), there, others).prefill is others[0]
        assert policy.route(request(chat("x")), there, others).prefill is None
    policy = prefix_policy(min_prefill_tokens=200)
    policy.kv_changed(there[1].url, 0, stored(LONG))
    asked.tokens = tokens_of(LONG)
    assert policy.route(asked, there, others) == (there[1], None)
    asked.tokens = [1, *tokens_of(LONG)]
    assert policy.route(asked, there, others).prefill is others[0]


class Broken(PrefixPolicy):
    async def prepare(self, *_: Any) -> None:
        raise RuntimeError("oops")

    def figures(self) -> dict[str, float]:
        raise RuntimeError("oh")


async def test_a_policy_that_fails_to_prepare_is_logged_and_the_request_goes_on(caplog: Any) -> None:
    async with servers(reply(200, {"ok": True})) as (one,), front(one.url, policy=Broken(Setup())) as f:
        assert (await f.client.post(CHAT, json=chat(LONG))).json() == {"ok": True}
        assert (await f.client.get("/fleet")).json()["figures"] == {}
        assert (await f.client.get("/metrics")).status_code == 200
    assert "' has not prepared a request: RuntimeError: oops" in caplog.text
