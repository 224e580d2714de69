"""`frame route` as a process before two processes of `frame serve` with the demo model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.free_ports import free_ports
from tests.routing.running import ROUTE, RunningFront, route
from tests.server.running import REAL, Running, server, until

CHAT: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]
LONG = {"messages": CHAT, "max_tokens": 60, "min_tokens": 60, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def where() -> list[str]:
    """Where the two servers publish KV events, and then where they send them again."""
    port = free_ports(4)
    return [f"tcp://127.0.0.1:{port + place}" for place in range(4)]


@pytest.fixture(scope="module")
def both(where: list[str]) -> Iterator[tuple[Running, Running]]:
    """Their events have either form."""
    arguments = ("--num-threads", "1", "--api-key", "inner")
    one, two = (
        (
            "--kv-events-endpoint",
            where[place],
            "--kv-events-replay-endpoint",
            where[place + 2],
            "--kv-events-format",
            form,
        )
        for place, form in enumerate(("array", "map"))
    )
    with server(REAL, *arguments, *one) as first, server(REAL, *arguments, *two) as second:
        yield first, second


@pytest.fixture(scope="module")
def front(both: tuple[Running, Running]) -> Iterator[RunningFront]:
    keys = ("--api-key", "outer", "--server-key", "inner")
    with route(*(each.url for each in both), *keys, "--policy", "round-robin") as running:
        yield running


def fleet(front: RunningFront) -> list[dict[str, Any]]:
    answer = httpx.get(f"{front.url}/fleet", headers={"x-api-key": "outer"}).json()
    servers: list[dict[str, Any]] = answer["servers"]
    return servers


def test_official_clients_get_the_answers_of_a_server(both: tuple[Running, Running], front: RunningFront) -> None:
    before = [each["answers"]["2xx"] for each in fleet(front)]
    texts = []
    for url, key in ((both[0].url, "inner"), (front.url, "outer"), (front.url, "outer")):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        chat = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=12, temperature=0)
        chunks = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=12, temperature=0, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
        greedy = {"temperature": 0}
        with claude.messages.stream(model="demo", messages=CHAT, max_tokens=12, extra_body=greedy) as stream:
            message = "".join(stream.text_stream)
        response = client.responses.create(model="demo", input="The sea", max_output_tokens=5, temperature=0)
        assert client.responses.retrieve(response.id).output_text == response.output_text
        listed = [model.id for model in client.models.list()]
        texts.append((chat.choices[0].message.content, streamed, message, response.output_text, listed))
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] == texts[0][1] == texts[0][2]
    after = [each["answers"]["2xx"] for each in fleet(front)]
    assert all(later - earlier >= 4 for earlier, later in zip(before, after, strict=True))


def test_errors_of_servers_pass_and_those_of_the_front_have_their_form(front: RunningFront) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="outer", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(model="demo", messages=CHAT, max_tokens=-1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")
    with pytest.raises(openai.AuthenticationError, match="a valid API key is needed"):
        client.with_options(api_key="inner").models.list()
    with pytest.raises(anthropic.AuthenticationError, match="a valid API key is needed"):
        anthropic.Anthropic(base_url=front.url, api_key="inner").messages.create(
            model="demo", messages=CHAT, max_tokens=3
        )


def test_servers_say_what_load_they_have(front: RunningFront) -> None:
    until(lambda: all(each["kv_usage"] is not None for each in fleet(front)), 10)
    assert [each["state"] for each in fleet(front)] == ["ready", "ready"]


async def test_a_client_that_leaves_frees_the_engine(both: tuple[Running, Running], front: RunningFront) -> None:
    headers, body = {"x-api-key": "outer"}, LONG | {"max_tokens": 4000, "min_tokens": 4000}
    async with (
        httpx.AsyncClient(base_url=front.url, headers=headers, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        await anext(answer.aiter_lines())
    until(lambda: not any(each["in_flight"] or each["other"] for each in fleet(front)), 10)


@pytest.mark.matrix
async def test_requests_survive_the_death_of_a_server(tmp_path: Path) -> None:
    """Those that had got nothing are answered by the other one, and streams end with an event that says why."""
    with server(REAL, "--num-threads", "1") as first, server(REAL, "--num-threads", "1") as second:
        listed = tmp_path / "servers.txt"
        listed.write_text(f"{first.url}\n{second.url}\n")
        with route("--servers", str(listed), "--health-seconds", "0.2") as front:
            async with httpx.AsyncClient(base_url=front.url, timeout=60) as client:
                whole = LONG | {"stream": False}
                asked = [asyncio.create_task(client.post("/v1/chat/completions", json=whole)) for _ in range(16)]
                streams = [asyncio.create_task(client.post("/v1/chat/completions", json=LONG)) for _ in range(4)]
                await asyncio.sleep(0.2)
                for pid in [first.process.pid, *first.children().values()]:
                    _kill(pid)
                answers = await asyncio.gather(*asked)
                assert {answer.status_code for answer in answers} == {200}
                assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
                ends = {
                    answer.content.rstrip().rpartition(b"\n\n")[2][:40] for answer in await asyncio.gather(*streams)
                }
                assert ends <= {b"data: [DONE]", b'data: {"error":{"message":"the server br'}
                listed.write_text(f"{second.url}\n")
                until(lambda: len(httpx.get(f"{front.url}/fleet").json()["servers"]) == 1, 10)
                assert (await client.post("/v1/chat/completions", json=whole)).status_code == 200


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def test_a_stop_signal_lets_streams_end(both: tuple[Running, Running]) -> None:
    with route(*(each.url for each in both), "--server-key", "inner") as front:
        async with (
            httpx.AsyncClient(base_url=front.url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=LONG) as answer,
        ):
            lines = answer.aiter_lines()
            await anext(lines)
            front.process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]
        assert front.wait() == 0
        assert "Traceback" not in front.text


async def test_a_second_signal_ends_it_at_once(both: tuple[Running, Running]) -> None:
    body = LONG | {"max_tokens": 4000, "min_tokens": 4000}
    with route(both[0].url, "--server-key", "inner") as front:
        async with (
            httpx.AsyncClient(base_url=front.url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            await anext(lines)
            front.process.send_signal(signal.SIGINT)
            until(lambda: "stopping once 1 requests have ended" in front.text)
            front.process.send_signal(signal.SIGINT)
            last = [line async for line in lines if line][-1]
        assert "the front was stopped before the answer was complete" in last
        assert front.wait() == 0
        assert "Traceback" not in front.text


def test_servers_without_a_connector_answer_as_pairs_too(both: tuple[Running, Running]) -> None:
    """The first computes the prompt and keeps nothing, so that the second computes it, too."""
    body = LONG | {"stream": False, "max_tokens": 5, "min_tokens": 5}
    texts = []
    with route(both[0].url, "--prefill", both[1].url, "--server-key", "inner") as front:
        for url in (both[0].url, front.url):
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": "inner"}, timeout=60)
            texts.append(answer.json()["choices"][0]["message"]["content"])
        servers = httpx.get(f"{front.url}/fleet").json()["servers"]
    assert texts[0] == texts[1]
    assert [server["prefills"] for server in servers] == [0, 1]


def posted(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}{path}", json=body, headers={"x-api-key": "inner"}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_prompts_go_where_they_are_cached_also_those_that_came_by_other_ways(
    both: tuple[Running, Running], where: list[str]
) -> None:
    sea = "Tell me all that you know about the sea, its depths, its tides and those who live in it. " * 6
    hill = "What grows on a hill in spring, and who walks there when the snow has gone? Say it in verse. " * 6

    def chat(url: str, text: str, **fields: Any) -> None:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}
        posted(url, "/v1/chat/completions", body)

    def looked(front: RunningFront) -> tuple[list[int], dict[str, float]]:
        found = httpx.get(f"{front.url}/fleet").json()
        return [one["answers"]["2xx"] for one in found["servers"]], found["figures"]

    urls = [each.url for each in both]
    for url, text in zip(urls, (sea, hill), strict=True):
        chat(url, text)
    events = ("--kv-events", *where[:2], "--kv-events-replay", *where[2:], "--plugin.prefix.min-body-bytes", "0")
    with route(*urls, "--policy", "prefix", *events) as front:
        until(lambda: looked(front)[1]["cached_blocks"] >= 16, 20, lambda: f"{looked(front)} {front.text}")
        for text, place in ((sea, 0), (hill, 1), (hill, 1), (sea, 0), (sea + "And the moon?", 0)):
            before, known = looked(front)
            chat(front.url, text)
            after, figures = looked(front)
            assert [new - old for new, old in zip(after, before, strict=True)] == [int(place == at) for at in range(2)]
            assert figures["known_tokens"] - known["known_tokens"] >= 96
        known = looked(front)[1]
        chat(front.url, sea, cache_salt="mine")
        assert looked(front)[1]["known_tokens"] == known["known_tokens"]
        tokens = posted(urls[1], "/tokenize", {"messages": [{"role": "user", "content": sea}]})["tokens"]
        before = looked(front)[0]
        posted(front.url, "/v1/completions", {"prompt": tokens, "max_tokens": 1})
        assert [new - old for new, old in zip(looked(front)[0], before, strict=True)] == [1, 0]


def test_a_port_in_use_is_refused_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*ROUTE, "a:1", "--port", port], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"frame: cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr.splitlines()[-1]


def test_open_files_are_as_many_as_there_may_be() -> None:
    limited = ["bash", "-c", 'ulimit -Sn 64; exec "$0" "$@"', *ROUTE]
    front = RunningFront(limited, "127.0.0.1:1")
    try:
        front.wait_ready()
        limits = Path(f"/proc/{front.process.pid}/limits").read_text()
        soft, hard = re.findall(r"Max open files +(\d+) +(\d+)", limits)[0]
        assert soft == hard
    finally:
        front.stop()
