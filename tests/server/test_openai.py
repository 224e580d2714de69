"""The OpenAI client against a real server whose engine repeats the prompt."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import FAKE, Running, server, until

TEXT = "Once upon a time there was a small cat."


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(
        FAKE, "--plugin.fake.delay", "0.002", "--plugin.fake.vocab_size", "2048", "--enable-prompt-tokens-details",
        "--max-n", "8", "--max-num-seqs", "512", "--disable-access-log",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tokens(running: Running, text: str) -> list[int]:
    response = httpx.post(f"{running.url}/tokenize", json={"prompt": text, "add_special_tokens": False})
    ids: list[int] = response.json()["tokens"]
    return ids


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5'; there are: demo"):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="x")
    assert caught.value.code == "model_not_found"


def test_completion(running: Running, client: openai.OpenAI) -> None:
    ids = tokens(running, TEXT)
    answer = client.completions.create(model="demo", prompt=ids, max_tokens=len(ids))
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(ids))
    assert answer.usage.total_tokens == 2 * len(ids)
    assert answer.object == "text_completion"
    again = client.completions.create(model="demo", prompt=ids, max_tokens=1)
    assert again.system_fingerprint == answer.system_fingerprint
    assert again.id != answer.id


def test_completion_of_many_prompts(running: Running, client: openai.OpenAI) -> None:
    first, second = tokens(running, "one two three"), tokens(running, "four five")
    answer = client.completions.create(model="demo", prompt=[first, second], n=2, max_tokens=len(second))
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[2:]] == ["four five"] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(first) + len(second)
    assert answer.usage.completion_tokens == 4 * len(second)
    texts: dict[int, str] = {}
    for chunk in client.completions.create(
        model="demo", prompt=["one two three", "four five"], n=2, max_tokens=5, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert sorted(texts) == [0, 1, 2, 3]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt=TEXT, max_tokens=20)
    stream = client.completions.create(
        model="demo", prompt=TEXT, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]


def test_echo_and_logprobs(running: Running, client: openai.OpenAI) -> None:
    ids = tokens(running, TEXT)
    answer = client.completions.create(model="demo", prompt=ids, max_tokens=3, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text.startswith(TEXT)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.text_offset is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.tokens) == len(ids) + 3
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
    only = client.completions.create(model="demo", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].text == TEXT
    assert only.usage is not None
    assert only.usage.completion_tokens == 0


def test_chat(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello world"}]
    answer = client.chat.completions.create(model="demo", messages=messages, max_completion_tokens=30, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    pieces: dict[int, list[str]] = {0: [], 1: []}
    roles = []
    stream = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=30, n=2, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            pieces[choice.index].append(choice.delta.content or "")
            roles += [choice.delta.role] if choice.delta.role else []
        last = chunk
    assert ["".join(pieces[index]) for index in (0, 1)] == [choice.message.content for choice in answer.choices]
    assert roles == ["assistant", "assistant"]
    assert last.usage == answer.usage


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hello"}], max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


def test_stop_string_and_extras(running: Running, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=TEXT, max_tokens=50, stop=[" small"])
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert " small" not in choice.text
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == " small"
    ids = tokens(running, TEXT)
    extra: dict[str, Any] = {
        "stop_token_ids": [ids[3]], "return_token_ids": True, "top_k": 5, "min_p": 0.1, "ignore_eos": True,
        "repetition_penalty": 1.1, "min_tokens": 1, "prompt_logprobs": 1, "logit_bias": {"5": 1.5},
    }  # fmt: skip
    answer = client.completions.create(model="demo", prompt=ids, max_tokens=50, extra_body=extra)
    fields = answer.choices[0].model_extra
    assert fields is not None
    assert fields["stop_reason"] == ids[3]
    assert fields["token_ids"] == ids[:4]
    assert fields["prompt_token_ids"] == ids
    assert fields["prompt_logprobs"][0] is None


def test_the_best_of_several(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=[TEXT, "two"], max_tokens=4, n=2, best_of=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 5 * 4


def test_a_response_has_the_name_that_was_asked_for(client: openai.OpenAI) -> None:
    ask = {"model": "demo", "prompt": "x", "max_tokens": 1}
    answer = client.completions.create(**ask, extra_body={"request_id": "mine"})  # type: ignore[call-overload]
    assert answer.id == "cmpl-mine"
    answer = client.completions.create(**ask, extra_headers={"X-Request-Id": "theirs"})  # type: ignore[call-overload]
    assert answer.id == "cmpl-theirs"


def test_tokenize_round_trip(running: Running) -> None:
    ids = tokens(running, "naïve 😀 text")
    back = httpx.post(f"{running.url}/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": "naïve 😀 text"}
    messages = [{"role": "user", "content": "hello"}]
    chat = httpx.post(f"{running.url}/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert chat["count"] == answer["usage"]["prompt_tokens"] == len(chat["token_strs"])
    wrong = httpx.post(f"{running.url}/detokenize", json={"tokens": [99999]})
    assert wrong.status_code == 400


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 1e6}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"bad_words": ["x"] * 2000}, "bad_words"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [999999]}, "allowed_token_ids"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "no role"}]}, "messages"),
    ({"messages": [{"role": "user<|x|>", "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, "prompt"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"user": "x" * 300}, "user"),
    ({"request_id": "a b"}, "request_id"),
]


@pytest.mark.parametrize(("fields", "name"), BAD_CHAT, ids=lambda value: str(value)[:40])
def test_bad_fields_get_one_clear_400(running: Running, fields: dict[str, Any], name: str) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    response = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == name, error
    assert "\n" not in error["message"]
    assert "object at" not in error["message"]
    assert "pydantic" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages must have at least 1 item, got 0"),
        ({"stop": [""]}, "stop.0 must have at least 1 character, got ''"),
        ({"stop": 5}, "stop must be a valid string, got 5"),
        ({"logit_bias": {"x": 1}}, r"logit_bias.x must match pattern '^\d{1,10}$', got 'x'"),
        ({"n": 1000}, "n must be at most 8 (--max-n), got 1000"),
        ({"top_p": 0}, "top_p must be greater than 0, got 0"),
        ({"top_p": 1e-35}, "top_p must be in [1e-30, 1], got 1e-35"),
        (
            {"allowed_token_ids": [1] * 5000},
            "allowed_token_ids must have at most 2048 entries, the vocabulary, got 5000",
        ),
    ],
)
def test_messages_name_field_bound_and_value(running: Running, fields: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    response = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "non-empty"),
        ([[]], "empty"),
        ([-1, 5], "prompt"),
        ([99999], "prompt"),
        (["a", 5], "mixture"),
        ([1.5], "mixture"),
        (None, "prompt"),
        ({"a": 1}, "prompt"),
        (["x"] * 257, "at most 256"),
        ([1] * 5000, "tokens"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_prompts_get_400(running: Running, prompt: Any, words: str) -> None:
    response = httpx.post(f"{running.url}/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]


def test_other_errors_have_the_same_shape(running: Running) -> None:
    for response, status in (
        (httpx.get(f"{running.url}/nothing"), 404),
        (httpx.get(f"{running.url}/v1/completions"), 405),
        (httpx.post(f"{running.url}/v1/completions", content=b"x" * (9 << 20)), 413),
        (httpx.post(f"{running.url}/v1/completions", content=b"{}"), 415),
        (httpx.post(f"{running.url}/v1/completions", json=[1]), 400),
        (httpx.post(f"{running.url}/v1/completions", headers={"content-type": "application/json"}), 400),
        (httpx.get(f"{running.url}/sleep"), 404),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_client_that_sends_too_much_reads_why(running: Running) -> None:
    """`http.client`, like most clients, reads nothing before it has sent everything."""
    address = running.url.removeprefix("http://")
    for body in (b"x" * 10_000_000, iter([b"x" * 1_000_000] * 10)):
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert (response.status, b"max-body-bytes" in response.read()) == (413, True)
        connection.close()


def test_a_failing_step_fails_its_requests_and_no_others(running: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this request can never run"):
        client.completions.create(model="demo", prompt=TEXT, extra_body={"extra_args": {"fault": "add"}})
    with pytest.raises(openai.RateLimitError, match="requests wait") as caught:
        client.completions.create(model="demo", prompt=TEXT, extra_body={"extra_args": {"fault": "queue"}})
    assert caught.value.status_code == 429
    with pytest.raises(openai.InternalServerError, match="the device said no"):
        client.completions.create(model="demo", prompt=TEXT, extra_body={"extra_args": {"fault": "step"}})
    with pytest.raises(openai.APIError, match="the device said no"):  # before or after the stream begins
        list(
            client.completions.create(
                model="demo", prompt=TEXT, max_tokens=50, stream=True, extra_body={"vllm_xargs": {"fault": "step"}}
            )
        )
    assert client.completions.create(model="demo", prompt=TEXT, max_tokens=2).choices[0].finish_reason == "length"


async def test_200_streams_at_once(running: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> str:
            stream = await client.completions.create(
                model="demo",
                prompt=[number + 100] * 3,
                max_tokens=24,
                stream=True,
                extra_body={"return_token_ids": True},
            )
            ids: list[int] = []
            async for chunk in stream:
                ids += (chunk.choices[0].model_extra or {})["token_ids"]
            assert ids == [number + 100] * 24
            return "done"

        async with asyncio.timeout(150):
            assert await asyncio.gather(*(one(number) for number in range(200))) == ["done"] * 200


async def test_hanging_up_aborts_long_before_the_end(running: Running) -> None:
    body = {"prompt": TEXT, "max_tokens": 400, "ignore_eos": True, "extra_args": {"fault": "slow"}}  # some 20 s
    async with httpx.AsyncClient() as http:
        async with http.stream("POST", f"{running.url}/v1/completions", json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                break
            until(lambda: running.metric("frame_num_requests_running") == 1)
        until(lambda: running.metric("frame_num_requests_running") == 0, 10)
        waiting = asyncio.create_task(http.post(f"{running.url}/v1/completions", json=body))
        await asyncio.to_thread(until, lambda: running.metric("frame_num_requests_running") == 1)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    until(lambda: running.metric("frame_num_requests_running") == 0, 10)


def test_metrics_and_version(running: Running, client: openai.OpenAI) -> None:
    before = running.metric("frame_generation_tokens_total")
    client.completions.create(model="demo", prompt=TEXT, max_tokens=7)
    assert running.metric("frame_generation_tokens_total") == before + 7
    text = httpx.get(f"{running.url}/metrics").text
    for name in ("time_to_first_token_seconds_bucket", "e2e_request_latency_seconds_count", "request_success_total"):
        assert f"frame_{name}" in text
    assert set(httpx.get(f"{running.url}/version").json()) == {"version"}
    assert "server" not in httpx.get(f"{running.url}/health").headers


def test_heads_and_broken_requests(running: Running) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    for head in (b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000, b"\x16\x03\x01\x02\x00garbage\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(head)
            data = b""
            with contextlib.suppress(OSError):
                while piece := connection.recv(65536):
                    data += piece
            assert data.startswith(b"HTTP/1.1 400") or data == b""
    assert running.engine().status_code == 200


def test_openapi_names_every_route(running: Running) -> None:
    paths = httpx.get(f"{running.url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health"} <= set(paths)
    assert json.dumps(paths["/v1/completions"]["post"]["requestBody"])


def test_references_in_the_openapi_document_lead_somewhere(running: Running) -> None:
    document = httpx.get(f"{running.url}/openapi.json").json()
    places = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(document)))
    assert places
    for place in places:
        found = document
        for part in place.removeprefix("#/").split("/"):
            found = found[part]
        assert found
    assert "$defs" not in json.dumps(document)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_timing_is_told_when_asked(running: Running, path: str) -> None:
    body = {"prompt": TEXT, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 5}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    assert "timing" not in httpx.post(running.url + path, json=body).json()

    def timed() -> dict[str, float]:
        found: dict[str, float] = httpx.post(running.url + path, json={**body, "return_timing": True}).json()["timing"]
        return found

    def unaccounted(timing: dict[str, float]) -> float:
        return timing["total_seconds"] - sum(timing[f"{phase}_seconds"] for phase in ("queue", "prefill", "decode"))

    timing = timed()
    assert set(timing) == {"queue_seconds", "prefill_seconds", "decode_seconds", "first_token_seconds", "total_seconds"}
    assert all(seconds >= 0 for seconds in timing.values())
    until(lambda: abs(unaccounted(timed())) < 0.05)  # a busy machine adds time between the phases
    assert timing["queue_seconds"] + timing["prefill_seconds"] == pytest.approx(timing["first_token_seconds"], abs=1e-5)
    for options, fields in ({}, {"timing"}), ({"stream_options": {"include_usage": True}}, {"timing", "usage"}):
        streamed = httpx.post(running.url + path, json={**body, "return_timing": True, "stream": True, **options}).text
        events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
        assert events[-1]["choices"] == []
        assert {"timing", "usage"} & set(events[-1]) == fields
        assert all("timing" not in event for event in events[:-1])
