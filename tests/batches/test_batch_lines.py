"""Lines through the routes of all default endpoints, over a text side that answers the same to everybody."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any, cast

import pytest

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.registry import Registry
from frame.core.server.app import build_app, make_endpoints
from frame.core.server.deadlines import DEADLINE
from frame.core.server.ingress import REQUEST
from frame.core.server.keys import KeyLimits
from frame.interfaces import RequestError
from frame.plugins.batches import lines as batch_lines
from frame.plugins.batches.lines import BatchLines, line_id
from frame.testing.fake_serving import FakeServing

HELLO = [{"role": "user", "content": "hello"}]


class Away(FakeServing):
    """Cannot serve the first `failures` chats."""

    failures = 0

    async def chat_prompt(self, messages: list[Any], **options: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise RequestError(429 if self.failures % 2 else 503, "the engine is away or busy")
        return await super().chat_prompt(messages, **options)


@pytest.fixture
def serving() -> Away:
    config, serving = FrameConfig.from_flat(max_body_bytes=2000), Away()
    build_app(config, cast(Any, serving), make_endpoints(config, Registry.load(), cast(Any, serving)))
    return serving


def line(url: str, name: str = "a", **body: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode()


async def results(serving: Away, lines: list[bytes], **options: Any) -> list[dict[str, Any]]:
    width = options.pop("width", 2)
    batch = BatchLines(serving.calls, width=lambda: width, url=options.pop("url", None))
    return [json.loads(result.line) async for result in batch.run(lines, **options)]


async def test_every_route_that_reads_json_may_be_asked(serving: Away) -> None:
    lines = [
        line("/v1/chat/completions", messages=HELLO),
        line("/v1/completions", prompt="hello"),
        line("/v1/responses", input="hello"),
        line("/v1/messages", messages=HELLO, max_tokens=5),
        line("/v1/embeddings", input="hello"),
        line("/v1/score", text_1="a", text_2=["b", "c"]),
        line("/v1/rerank", query="a", documents=["b", "c"]),
        line("/tokenize", prompt="hello"),
    ]
    found = await results(serving, lines)
    assert [row["response"]["status_code"] for row in found] == [200] * len(lines)
    assert {row["id"] for row in found} == {line_id(number, text) for number, text in enumerate(lines, 1)}


async def test_what_is_refused_names_the_reason_in_the_shape_of_its_api(serving: Away) -> None:
    found = await results(serving, [
        line("/v1/chat/completions", "chat", messages=[]),
        line("/v1/messages", "message", messages=[], max_tokens=5),
        line("/v1/responses", "later", input="x", background=True),
        line("/v1/files", "file"),
        line("/health", "get"),
        b"x" * 3000,
    ])  # fmt: skip
    rows = {row["custom_id"]: row for row in found}
    assert rows["message"]["response"]["body"]["type"] == "error"
    assert "param" in rows["chat"]["response"]["body"]["error"]
    for name in ("chat", "message"):
        assert rows[name]["error"]["code"] == "invalid_request_error"
    for name, words in (("later", "background"), ("file", "no route"), ("get", "no route"), (None, "exceeds 2000")):
        assert rows[name]["response"] is None
        assert words in rows[name]["error"]["message"]


async def test_what_cannot_be_served_now_is_tried_again(serving: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "_WAITS_SECONDS", (0.0, 0.0))
    chat = line("/v1/chat/completions", messages=HELLO)
    serving.failures = 2
    (row,) = await results(serving, [chat])
    assert row["response"]["status_code"] == 200
    serving.failures = 3
    batch = BatchLines(serving.calls)
    (result,) = [result async for result in batch.run([chat])]
    assert (result.succeeded, result.unserved) == (False, True)


async def test_done_blank_and_stopped(serving: Away) -> None:
    lines = [line("/tokenize", f"n{number}", prompt="x") for number in range(5)]
    lines[2] = b"\n"
    found = await results(serving, lines, done={line_id(1, lines[0])})
    assert {row["custom_id"] for row in found} == {"n1", "n3", "n4"}
    ended: list[str] = []
    async for result in BatchLines(serving.calls, width=lambda: 1).run(lines, stopped=lambda: len(ended) == 2):
        ended.append(json.loads(result.line)["custom_id"])
    assert ended == ["n0", "n1"]


async def test_no_line_starts_while_its_key_has_no_tokens(serving: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "_LOOK_SECONDS", 0.001)
    delays = iter([0.0, 5.0, 5.0, 5.0, 0.0, 5.0])
    asked: list[str] = []

    def delay(owner: str) -> float:
        asked.append(owner)
        return next(delays, 5.0)

    monkeypatch.setattr(serving.calls, "delay", delay)
    lines = [line("/tokenize", f"n{number}", prompt="x") for number in range(4)]
    batch = BatchLines(serving.calls, owner="me").run(lines, stopped=lambda: len(asked) > 8)
    assert [json.loads(result.line)["custom_id"] async for result in batch] == ["n0", "n1"]
    assert set(asked) == {"me"}


async def test_lines_in_flight_count_with_the_tokens_that_they_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(Away, "pooling", None)  # it generates
    config, serving = FrameConfig.from_flat(max_tokens_per_minute=1000), Away()
    limits = KeyLimits(config.server)
    build_app(config, cast(Any, serving), make_endpoints(config, Registry.load(), cast(Any, serving)), limits)
    answer, running, most = serving.chat_prompt, 0, list[int]()

    async def slowly(messages: list[Any], **options: Any) -> Any:
        nonlocal running
        running += 1
        most[-1] = max(most[-1], running)
        for _ in range(50):
            await asyncio.sleep(0)
        running -= 1
        return await answer(messages, **options)

    monkeypatch.setattr(serving, "chat_prompt", slowly)
    for fields in ({"max_tokens": 300}, {"max_completion_tokens": 100, "n": 3}, {}):  # at most 512 without a limit
        most.append(0)
        lines = [line("/v1/chat/completions", f"n{number}", messages=HELLO, **fields) for number in range(6)]
        found = await results(serving, lines, width=64)
        assert [row["response"]["status_code"] for row in found] == [200] * 6
        assert limits.delay("") == 0.0  # what was not used is there again
    assert most == [4, 4, 2]


async def test_wrong_lines_end_with_the_batch_too(serving: Away) -> None:
    assert await results(serving, [b"no JSON\n"] * 100, stopped=lambda: True) == []


async def test_lines_for_a_pooling_model_may_use_the_tokens_of_their_prompts_alone() -> None:
    serving, config = Away(), FrameConfig.from_flat(max_tokens_per_minute=1000)
    endpoints = make_endpoints(config, Registry.load(), cast(Any, serving))
    build_app(config, cast(Any, serving), endpoints, KeyLimits(config.server))
    assert cast(Any, serving.calls)._most_tokens({"input": "word " * 80}) < 120


async def test_one_route_only(serving: Away) -> None:
    lines = [line("/tokenize", "a", prompt="x"), line("/v1/completions", "b", prompt="x")]
    found = {row["custom_id"]: row for row in await results(serving, lines, url="/tokenize")}
    assert found["a"]["error"] is None
    assert "there are: /tokenize" in found["b"]["error"]["message"]


async def test_a_line_is_a_request_of_its_own(serving: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    answer = serving.chat_prompt

    async def noting(messages: list[Any], **options: Any) -> Any:
        seen.append(REQUEST.get())
        return await answer(messages, **options)

    monkeypatch.setattr(serving, "chat_prompt", noting)
    REQUEST.set({"path": "/v1/batches", "headers": [], DEADLINE: (0.0, 1.0)})  # the request that made the batch is over
    path = "/v1/chat/completions"
    found = await results(serving, [line(path, messages=HELLO), line(path, messages=HELLO, timeout=7)], width=1)
    assert [row["response"]["status_code"] for row in found] == [200, 200]
    assert [(scope["path"], scope.get(DEADLINE, (0, None))[1]) for scope in seen] == [(path, None), (path, 7)]
    (refused,) = await results(serving, [line(path, messages=HELLO, timeout="soon")])
    assert refused["response"]["status_code"] == 400
    assert "timeout must be a number" in refused["error"]["message"]


def test_what_is_wrong_with_a_file_is_found_before_it_is_run(serving: Away) -> None:
    batch = BatchLines(serving.calls, url="/v1/completions")

    def check(*lines: bytes, most: int = 100) -> tuple[int, list[tuple[int | None, str]]]:
        number, problems = batch.check(io.BytesIO(b"\n".join(lines)), most)
        return number, [(problem["line"], problem["code"]) for problem in problems]

    good = [line("/v1/completions", name, prompt="x") for name in "abc"]
    assert check(good[0], b"", good[1], b"") == (2, [])
    assert check(*good, most=2) == (2, [(None, "too_many_lines")])
    assert check(good[0], good[0]) == (2, [(2, "duplicate_custom_id")])
    assert check(b"[]", good[0], b"{", line("/health")) == (
        4,
        [(1, "invalid_line"), (3, "invalid_line"), (4, "invalid_line")],
    )
    assert check(b"x" * 3000, good[0]) == (1, [(1, "invalid_line")])  # the rest of the long line is not looked at
    assert check(b"", b" ") == (0, [(None, "empty_file")])
    assert len(check(*[b"{"] * 99)[1]) == 50


def test_a_file_of_newlines_is_given_up_at_once(serving: Away) -> None:
    batch, newlines = BatchLines(serving.calls), io.BytesIO(b"\n" * 100_000_000)
    number, problems = batch.check(newlines, 50_000)
    assert (number, problems[0]["code"]) == (0, "too_many_lines")
    assert newlines.tell() <= 50_001


async def test_lines_that_are_left_out_leave_the_loop_free(serving: Away) -> None:
    done = {line_id(number, b"x") for number in range(1, 2001)}
    running = asyncio.create_task(results(serving, [b"x", b""] * 1000, done=done))
    turns = 0
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    assert await running == []
    assert turns > 1000
