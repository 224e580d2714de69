"""The Anthropic client against a real server whose engine says what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.server.running import FAKE, Running, server

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HELLO: list[Any] = [{"role": "user", "content": "Hello there!"}]
KEY = "sesame"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(
        FAKE, "--plugin.fake.vocab_size", "2048", "--enable-prompt-tokens-details", "--disable-access-log",
        "--api-key", KEY, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ids(running: Running) -> Any:
    def encode(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        response = httpx.post(f"{running.url}/tokenize", json=body, headers={"x-api-key": KEY})
        found: list[int] = response.json()["tokens"]
        return found

    return encode


@pytest.fixture(scope="module")
def says(ids: Any) -> Any:
    """The extra body that makes the engine say a text."""
    return lambda text: {"extra_args": {"answer": ids(text)}}


def strict(message: Message) -> Message:
    return Message.model_validate(message.to_dict(), strict=True)


def test_a_message(client: anthropic.Anthropic, ids: Any, says: Any) -> None:
    message = client.messages.create(model="demo", max_tokens=50, messages=HELLO, extra_body=says("Good day to you."))
    strict(message)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "Good day to you."  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "demo")
    assert message.usage.output_tokens == len(ids("Good day to you."))
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 3


def test_a_stream_builds_the_same_message(client: anthropic.Anthropic, says: Any) -> None:
    text = "One, two, three and so on."
    whole = client.messages.create(model="demo", max_tokens=50, messages=HELLO, extra_body=says(text))
    with client.messages.stream(model="demo", max_tokens=50, messages=HELLO, extra_body=says(text)) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert final.content[0].text == text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_events_come_in_their_order(client: anthropic.Anthropic, says: Any) -> None:
    events = list(
        client.messages.create(model="demo", max_tokens=9, messages=HELLO, stream=True, extra_body=says("a b c"))
    )
    for event in events:
        EVENTS.validate_python(event.to_dict())
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_the_asynchronous_client(running: Running, says: Any) -> None:
    async with anthropic.AsyncAnthropic(base_url=running.url, auth_token=KEY, max_retries=0) as client:
        message = await client.messages.create(model="demo", max_tokens=9, messages=HELLO, extra_body=says("Yes."))
        assert strict(message).content[0].text == "Yes."  # type: ignore[union-attr]
        async with client.messages.stream(
            model="demo", max_tokens=9, messages=HELLO, extra_body=says("No, not yet.")
        ) as stream:
            assert "".join([text async for text in stream.text_stream]) == "No, not yet."


def test_stop_reasons(client: anthropic.Anthropic, says: Any) -> None:
    def ask(**options: Any) -> Message:
        options = {"max_tokens": 50, **options}
        return client.messages.create(model="demo", messages=HELLO, extra_body=says("one two three four"), **options)

    stopped = ask(stop_sequences=[" three", "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert stopped.content[0].text == "one two"  # type: ignore[union-attr]
    assert ask(max_tokens=1).stop_reason == "max_tokens"
    assert ask().stop_reason == "end_turn"


def test_system_blocks_and_prefill_reach_the_template(client: anthropic.Anthropic) -> None:
    """The engine repeats the prompt, so the answer shows what was rendered."""
    message = client.messages.create(
        model="demo",
        max_tokens=60,
        system=[{"type": "text", "text": "Be brief."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]},
            {"role": "assistant", "content": "My colour is"},
        ],
    )
    text = message.content[0].text  # type: ignore[union-attr]
    assert "Be brief." in text
    assert "Name a colour." in text
    assert "My colour is" in text


TOOLS: list[Any] = [
    {"name": "weather", "description": "Tells the weather.",
     "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
]  # fmt: skip
CALLS = (
    "<think>\nLet me see.\n</think>\n\nI will look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def check_calls(message: Message) -> None:
    strict(message)
    thought, text, *calls = message.content
    assert thought.type == "thinking"
    assert thought.thinking.strip() == "Let me see."
    assert text.type == "text"
    assert text.text.strip() == "I will look."
    assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == [
        ("weather", {"city": "Paris"}), ("weather", {"city": "Rome"}),
    ]  # fmt: skip
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


def test_thinking_and_tool_calls(client: anthropic.Anthropic, says: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 200, "messages": HELLO, "tools": TOOLS}
    whole = client.messages.create(**ask, extra_body=says(CALLS))
    check_calls(whole)
    with client.messages.stream(**ask, extra_body=says(CALLS)) as stream:
        for event in stream:
            assert event.type
        check_calls(stream.get_final_message())
    one = client.messages.create(
        **ask, tool_choice={"type": "auto", "disable_parallel_tool_use": True}, extra_body=says(CALLS)
    )
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "Sunny."}]}
        for block in whole.content
        if block.type == "tool_use"
    ]
    back: list[Any] = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    last = client.messages.create(**{**ask, "messages": back}, extra_body=says("It is sunny."))
    assert [block.type for block in last.content] == ["text"]
    assert last.stop_reason == "end_turn"


def test_a_demanded_call_and_a_demanded_format(client: anthropic.Anthropic, says: Any) -> None:
    """The call goes first: a format holds for turns of text. The engine here obeys no grammar, and repeats a call."""
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 200, "messages": HELLO, "tools": TOOLS}
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        said = says('[{"name": "weather", "parameters": {"city": "Rome"}}]')
        message = client.messages.create(**ask, tool_choice=choice, extra_body={"output_config": schema, **said})
        assert [(block.type, message.stop_reason) for block in message.content] == [("tool_use", "tool_use")]


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    tools: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
    count = client.messages.count_tokens(model="demo", messages=HELLO, system="Be brief.", tools=tools)
    MessageTokensCount.model_validate(count.to_dict(), strict=True)
    used = client.messages.create(model="demo", max_tokens=1, messages=HELLO, system="Be brief.", tools=tools).usage
    assert count.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)
    assert count.input_tokens > client.messages.count_tokens(model="demo", messages=HELLO).input_tokens


def test_edits_of_the_context_that_do_nothing_are_taken(client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 2, "messages": HELLO}
    edits: dict[str, Any] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    answer = client.beta.messages.create(**ask, context_management=edits)
    assert answer.context_management is not None
    assert answer.context_management.applied_edits == []
    with pytest.raises(anthropic.BadRequestError, match="'forget', which is not served"):
        client.messages.create(**ask, extra_body={"context_management": {"edits": [{"type": "forget"}]}})


def test_paths_below_messages_that_are_not_there(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.batches.list()
    error: Any = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    assert error["error"]["message"] == "no route '/v1/messages/batches'"


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list().data
    assert model.max_input_tokens == model.to_dict()["max_model_len"] - 1
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert model.created_at.year >= 2024
    assert client.models.retrieve("demo").id == "demo"


def test_keys_come_in_both_forms(running: Running) -> None:
    for options in ({"api_key": KEY}, {"auth_token": KEY}):
        with anthropic.Anthropic(base_url=running.url, max_retries=0, **options) as client:  # type: ignore[arg-type]
            assert client.messages.count_tokens(model="demo", messages=HELLO).input_tokens > 0
    with (
        anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        client.messages.count_tokens(model="demo", messages=HELLO)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": []}]}, "must hold at least one block"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "'video' is not accepted"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "not accepted at this place"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages.0.content.0 must be"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "text must be text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": "x"}]}]}, "must be an object"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": ["x" * 257]}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "n must be 1"),
    ({"tools": [{"name": "a", "type": "web_search_20250305"}]}, "no tool type"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"tools": [{"name": "a"}], "tool_choice": {"type": "tool", "name": "b"}}, "'b'"),
    ({"container": "c_1"}, "container is not served"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_fields_get_one_clear_error(client: anthropic.Anthropic, fields: dict[str, Any], words: str) -> None:
    body = {"max_tokens": 5, "messages": HELLO, **fields}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.post("/v1/messages", body={"model": "demo", **body}, cast_to=Message)
    error = caught.value.body
    assert error["type"] == "error"  # type: ignore[index]
    assert error["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert words in error["error"]["message"]  # type: ignore[index]


def test_other_errors(client: anthropic.Anthropic, ids: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'claude'"):
        client.messages.create(model="claude", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.APIStatusError, match="request_too_large"):
        client.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": "x" * (9 << 20)}])
    with pytest.raises(anthropic.APIStatusError, match="the device said no"):  # before or after the stream begins
        list(
            client.messages.create(
                model="demo", max_tokens=50, messages=HELLO, stream=True, extra_body={"extra_args": {"fault": "step"}}
            )
        )
