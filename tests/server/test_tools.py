"""Tool calls and reasoning through the OpenAI client: the engine repeats the prompt, which is what the model "said"."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.running import FAKE, Running, server

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "get_time"}}


def call(name: str = "get_weather", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


THOUGHT = "The user wants the weather."
PARIS, ROME = call(city="Paris"), call(city='"Rome" {naïve} 日本')
SAID = f"<think>\n{THOUGHT}\n</think>\n\nLet me look.\n{PARIS}\n{ROME}"


PARSER_FILE = """
from frame import Provider, hookimpl


@hookimpl
def frame_tool_parsers():
    return [Provider("of_a_file", "frame.plugins.parsers.json_formats:HermesParser", api=">=0.2.dev1,<0.3")]
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("parsers") / "parser_of_a_file.py"
    file.write_text(PARSER_FILE)
    with server(
        FAKE, "--plugin.fake.delay", "0.001", "--plugin.fake.vocab_size", "2048", "--disable-access-log",
        "--enable-auto-tool-choice",
        "--tool-parser-plugin", str(file), "--tool-call-parser", "of_a_file", "--reasoning-parser", "qwen3",
        "--chat-template", "{{ messages[-1]['content'] }}",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def request(text: str, **fields: Any) -> dict[str, Any]:
    extra = {"extra_args": {"once": True}, **fields.pop("extra_body", {})}
    return {
        "model": "demo", "messages": [{"role": "user", "content": text}], "tools": [TOOL, OTHER], "max_tokens": 400,
        "extra_body": extra, **fields,
    }  # fmt: skip


def streamed(client: openai.OpenAI, text: str, **fields: Any) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """What a client puts together from the deltas, by choice, and the chunks."""
    choices: dict[int, dict[str, Any]] = {}
    chunks = list(client.chat.completions.create(**request(text, **fields), stream=True))
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"content": "", "reasoning": "", "calls": [], "finish": None})
            choice["content"] += part.delta.content or ""
            reasoning = (part.delta.model_extra or {}).get("reasoning") or ""
            assert ((part.delta.model_extra or {}).get("reasoning_content") or "") == reasoning
            choice["reasoning"] += reasoning
            for piece in part.delta.tool_calls or ():
                assert piece.function is not None
                if piece.id:
                    assert (piece.type, piece.index) == ("function", len(choice["calls"]))
                    choice["calls"].append([piece.id, piece.function.name, ""])
                choice["calls"][piece.index][2] += piece.function.arguments or ""
            choice["finish"] = part.finish_reason or choice["finish"]
    return choices, chunks


def test_calls_content_and_reasoning(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**request(SAID))
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.model_extra["reasoning"] == THOUGHT
    assert choice.message.model_extra["reasoning_content"] == THOUGHT
    calls: Any = choice.message.tool_calls
    assert [one.function.name for one in calls] == ["get_weather"] * 2
    assert json.loads(calls[0].function.arguments) == {"city": "Paris"}
    assert json.loads(calls[1].function.arguments) == {"city": '"Rome" {naïve} 日本'}
    assert len({one.id for one in calls}) == 2
    assert all(one.type == "function" and one.id.startswith("call_") for one in calls)
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens


def test_a_stream_is_the_same(client: openai.OpenAI) -> None:
    choices, chunks = streamed(client, SAID, stream_options={"include_usage": True})
    whole = client.chat.completions.create(**request(SAID))
    message = whole.choices[0].message
    assert choices[0]["content"] == message.content
    assert choices[0]["reasoning"] == THOUGHT
    assert choices[0]["finish"] == "tool_calls"
    assert [(name, text) for _, name, text in choices[0]["calls"]] == [
        (one.function.name, one.function.arguments) for one in message.tool_calls or () if one.type == "function"
    ]
    pieces = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    assert len(pieces) > 6, "arguments came at once"
    assert chunks[-1].usage == whole.usage


def test_the_sdk_accumulates_the_stream(client: openai.OpenAI) -> None:
    fields = request(SAID)
    fields["tools"] = [openai.pydantic_function_tool(_Weather, name="get_weather")]
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    calls: Any = final.choices[0].message.tool_calls
    assert [json.loads(one.function.arguments)["city"] for one in calls] == ["Paris", '"Rome" {naïve} 日本']
    assert final.choices[0].finish_reason == "tool_calls"


def test_many_choices(client: openai.OpenAI) -> None:
    choices, _ = streamed(client, SAID, n=2)
    assert choices[0].pop("calls")[0][0] != choices[1].pop("calls")[0][0]
    assert choices[0] == choices[1]


def test_one_call_unless_parallel(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**request(SAID, parallel_tool_calls=False))
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    choices, _ = streamed(client, SAID, parallel_tool_calls=False)
    assert len(choices[0]["calls"]) == 1


def test_without_tools_text_stays_text(client: openai.OpenAI) -> None:
    for fields in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        answer = client.chat.completions.create(**request(SAID, **fields))
        message = answer.choices[0].message
        assert message.content == f"Let me look.\n{PARIS}\n{ROME}"
        assert message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"


def test_reasoning_may_be_left_out(client: openai.OpenAI) -> None:
    fields = {"extra_body": {"include_reasoning": False}}
    answer = client.chat.completions.create(**request(SAID, **fields))
    assert "reasoning" not in (answer.choices[0].message.model_extra or {})
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    choices, _ = streamed(client, SAID, **fields)
    assert choices[0]["reasoning"] == ""
    assert choices[0]["content"] == "Let me look."


def test_an_unfinished_call(client: openai.OpenAI) -> None:
    text = f"Wait.\n{PARIS[:-20]}"
    answer = client.chat.completions.create(**request(text, max_tokens=500, extra_body={"extra_args": {"once": True}}))
    (one,) = answer.choices[0].message.tool_calls or ()
    assert one.type == "function"
    assert PARIS.find(one.function.arguments) > 0
    broken = "<tool_call>\n{'name': nothing}\n</tool_call>"
    assert client.chat.completions.create(**request(broken)).choices[0].message.content == broken


class _Weather(BaseModel):
    city: str


WRONG = [
    ({"tools": [{"type": "function"}]}, "tools", "tools[0] must be"),
    ({"tools": [TOOL, TOOL]}, "tools", "two functions called 'get_weather'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name must be"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools",
        "tools[0].function.parameters must have type 'object', got 'array'",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
            ]
        },
        "tools",
        "parameters.properties.a.type must be one of array",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": [1]}}}],
            "tool_choice": "required",
        },
        "tools",
        "parameters.$defs must map names to schemas, got [1]",
    ),
    ({"tool_choice": "sometimes"}, "tool_choice", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "get_wether"}}}, "tool_choice", "did you mean"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "'required' needs tools"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_wrong_tools_are_named(client: openai.OpenAI, fields: Any, param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request("x", **fields))
    assert caught.value.param == param
    assert message in str(caught.value)


def test_a_round_of_call_result_and_answer(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**request(SAID)).choices[0].message
    fields = request("It rains in Paris.")
    calls = [call.id for call in first.tool_calls or ()]
    results = [{"role": "tool", "tool_call_id": call, "content": "rain"} for call in calls]
    fields["messages"] = [{"role": "user", "content": "Weather?"}, first, *results, *fields["messages"]]
    answer = client.chat.completions.create(**fields).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (
        "It rains in Paris.",
        None,
        "stop",
    )
