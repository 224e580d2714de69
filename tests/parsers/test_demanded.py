"""Calls that a request demands: the grammar holds a model that knows nothing of tools to valid arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from frame import LLM, RequestOutputKind, SamplingParams
from frame.core.config.tree import FrameConfig
from frame.core.front.output_parsers import OutputParsers
from frame.core.plugin_host.registry import Registry
from frame.interfaces import ParserRequest, ParserSetup, StructuredOutputsParams, Tool
from frame.plugins.parsers.json_list import calls_schema

from .test_call_tags import APERTUS, COHERE, GIGACHAT, HERMES, KIMI, LIST, render_with

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "place": {"$ref": "#/$defs/place"},
            },
            "required": ["city", "days", "place"],
            "additionalProperties": False,
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"exact": {"type": "boolean"}},
                    "required": ["exact"],
                    "additionalProperties": False,
                }
            },
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(max_model_len=512)
    yield llm
    llm.close()


def parsers(reasoning: str | None = None) -> OutputParsers:
    registry, config = Registry.load(), FrameConfig()

    def encode(text: str) -> list[int]:
        return [1 for _ in text]

    return OutputParsers(
        forced=registry.make("tool-parser", "json", ParserSetup(), config),
        reasoning=registry.make("reasoning-parser", reasoning, ParserSetup(), config) if reasoning else None,
        encode=encode,
    )


def run(llm: LLM, seed: int = 0, **options: Any) -> tuple[Any, str | None]:
    turn = parsers().turn(**options)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=150, output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = llm.generate(["What is the weather?"], turn.constrain(params, "What is the weather?"), use_tqdm=False)
    turn.read(output.outputs[0])
    return turn.message(), turn.finish_reason(output.outputs[0])


def check(call: Any) -> None:
    arguments = json.loads(call.arguments)
    if call.name == "get_time":
        assert arguments == {}
        return
    assert call.name == "get_weather"
    assert set(arguments) == {"city", "days", "place"}
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert arguments["place"]["exact"] in (True, False)


def only_call(llm: LLM, turn: Any, begin: str, end: str, **sampling: int) -> tuple[Any, Any]:
    """The completion of a turn that must be one call, between `begin` and `end`, and that call."""
    params = SamplingParams(temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
    (output,) = llm.generate(["What is the weather?"], turn.constrain(params, "What is the weather?"), use_tqdm=False)
    (completion,) = output.outputs
    assert completion.text.startswith(begin)
    assert completion.text.endswith(end)
    turn.read(completion)
    (call,) = turn.message().calls
    check(call)
    return completion, call


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_demanded_call_has_valid_arguments(llm: LLM, choice: Any) -> None:
    for seed in range(3):
        message, reason = run(llm, seed, tools=[WEATHER, TIME], tool_choice=choice, parallel=False)
        assert reason == "tool_calls"
        (call,) = message.calls
        check(call)
        assert call.name == "get_weather" or choice == "required"
        assert message.content == ""


def test_equal_names_of_definitions_in_two_tools_are_kept_apart() -> None:
    def tool(name: str, kind: str) -> Tool:
        item = {"type": kind, "description": "of a list", "x": {"$ref": "#/$defs/Other"}}
        place = {"$ref": "#/$defs/a~1b"}
        return Tool(name, {
            "properties": {"items": {"type": "array", "items": place}, "first": {"$ref": "#/$defs/a~1b/x"}},
            "$defs": {"a/b": item, "Other": {"type": "null"}},
        })  # fmt: skip

    tools = [tool("f", "integer"), tool("g", "string"), tool("h", "string")]
    schema = calls_schema(ParserRequest(tools=tools))
    assert set(schema["$defs"]) == {"a/b", "Other", "g.a/b", "h.a/b"}
    for each, place in zip(schema["items"]["anyOf"], ("a~1b", "g.a~1b", "h.a~1b"), strict=True):
        properties = each["properties"]["parameters"]["properties"]
        assert properties["items"]["items"] == {"$ref": f"#/$defs/{place}"}
        assert properties["first"] == {"$ref": f"#/$defs/{place}/x"}
    kinds = {name: definition["type"] for name, definition in schema["$defs"].items()}
    assert kinds == {"a/b": "integer", "Other": "null", "g.a/b": "string", "h.a/b": "string"}


def test_allowed_tools_may_be_demanded(llm: LLM) -> None:
    tools = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": tools}
    message, _ = run(llm, tools=[WEATHER, TIME], tool_choice=choice)
    assert [(call.name, call.arguments.replace(" ", "")) for call in message.calls] == [("get_time", "{}")]


def test_a_constraint_begins_after_the_reasoning() -> None:
    turn = parsers("qwen3").turn(tools=[TIME], tool_choice="required")
    params = turn.constrain(SamplingParams(), "<|im_start|>assistant\n<think>\n")
    assert params.structured_outputs is not None
    assert len(params.structured_outputs.start_after) == len("</think>")
    closed = (
        parsers("qwen3")
        .turn()
        .constrain(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), "<think>\n\n</think>\n\n")
    )
    assert closed.structured_outputs is not None
    assert closed.structured_outputs.start_after == []


def test_a_demanded_call_replaces_the_format_of_the_text() -> None:
    turn = parsers().turn(tools=[TIME], tool_choice="required")
    params = turn.constrain(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), "")
    assert params.structured_outputs is not None
    assert params.structured_outputs.regex is None
    assert "get_time" in json.dumps(params.structured_outputs.json)


@pytest.mark.parametrize(
    ("name", "template", "begin", "end"),
    [
        ("hermes", HERMES, '<tool_call>\n{"name": "get_weather", "arguments": ', "</tool_call>"),
        ("mistral", LIST, '[TOOL_CALLS] [{"name": "get_weather", "arguments": ', "]"),
        ("apertus", APERTUS, '<|tools_prefix|>[{"get_weather": ', "]<|tools_suffix|>"),
        ("cohere_command3", COHERE, "<|START_ACTION|>[", "<|END_ACTION|>"),
        (
            "gigachat3",
            GIGACHAT,
            '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": ',
            "}",
        ),
        ("kimi_k2", KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:", "section_end|>"),
    ],
)
def test_a_demanded_call_has_the_format_of_the_model(llm: LLM, name: str, template: str, begin: str, end: str) -> None:
    own = Registry.load().make("tool-parser", name, ParserSetup(render_with(template)), FrameConfig())
    turn = replace(parsers(), tools=own).turn(tools=[WEATHER], tool_choice=NAMED, parallel=False)
    completion, _ = only_call(llm, turn, begin, end, max_tokens=200)
    assert turn.finish_reason(completion) == "tool_calls"


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("qwen3_coder", "<tool_call>\n<function=get_", "</function>\n</tool_call>"),
        ("seed_oss", "<seed:tool_call>\n<function=get_", "</function>\n</seed:tool_call>"),
        ("glm45", "<tool_call>get_", "</tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_', "</invoke>\n</minimax:tool_call>"),
        ("gemma4", "<|tool_call>call:get_", "}<tool_call|>"),
        ("functiongemma", "<start_function_call>call:get_", "}<end_function_call>"),
        ("glm47", "<tool_call>get_", "</tool_call>"),
        ("mimo", "<tool_call>\n<function=get_", "</function>\n</tool_call>"),
        (
            "step3",
            "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:",
            "<｜tool_calls_end｜>",
        ),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="get_', "<|close|>call<|sep|><|close|>tools<|sep|>"),
        ("minimax_m3", ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_', "]<]minimax[>[</tool_call>"),
        ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_', "</｜DSML｜tool_calls>"),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_', "</｜DSML｜function_calls>"),
    ],
)
@pytest.mark.parametrize("choice", ["required", pytest.param(NAMED, marks=pytest.mark.matrix)])
def test_a_demanded_call_of_a_format_with_tags_has_its_arguments_in_them(
    llm: LLM, name: str, begin: str, end: str, choice: Any
) -> None:
    own = Registry.load().make("tool-parser", name, ParserSetup(), FrameConfig())
    turn = replace(parsers(), tools=own).turn(tools=[WEATHER, TIME], tool_choice=choice, parallel=False)
    _, call = only_call(llm, turn, begin, end, seed=1, max_tokens=300)
    assert call.name == "get_weather" or choice == "required"
    assert turn.message().content == ""


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"city": {"type": "string", "pattern": "^[A-Z]"}}},
        {"properties": {"city": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]}}},
        {"properties": {}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]},
        {"required": ["a"]},
    ],
    ids=["pattern", "length in a union", "any name", "union", "no property"],
)
def test_calls_whose_schemas_tags_cannot_enforce_are_demanded_as_a_json_list(parameters: Any) -> None:
    own = Registry.load().make("tool-parser", "qwen3_coder", ParserSetup(), FrameConfig())
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    turn = replace(parsers(), tools=own).turn(tools=[tool], tool_choice="required")
    constraint = turn.constrain(SamplingParams(), "").structured_outputs
    assert constraint is not None
    assert '"f"' in json.dumps(constraint.json)


@pytest.mark.parametrize(
    "schema", [{"type": "string", "enum": 5}, {"anyOf": 5}, {"oneOf": {"a": 1}}, True, {"enum": []}]
)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_the_grammar_compiler_judges_schemas_that_are_no_schemas(schema: Any, choice: str) -> None:
    own = Registry.load().make("tool-parser", "qwen3_coder", ParserSetup(), FrameConfig())
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    turn = replace(parsers(), tools=own, auto=True).turn(tools=[tool], tool_choice=choice)
    assert turn.constrain(SamplingParams(), "").structured_outputs is not None


def test_an_argument_whose_schema_is_a_reference_is_json(llm: LLM) -> None:
    own = Registry.load().make("tool-parser", "qwen3_coder", ParserSetup(), FrameConfig())
    turn = replace(parsers(), tools=own).turn(tools=[WEATHER], tool_choice=NAMED)
    constraint = turn.constrain(SamplingParams(), "").structured_outputs
    assert constraint is not None
    assert "#/$defs/place" in (constraint.structural_tag or "")


@pytest.mark.parametrize("name", ["openai", "pythonic"])
def test_strict_tools_of_a_format_without_a_grammar_are_named_in_the_log_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = Registry.load().make("tool-parser", name, ParserSetup(), FrameConfig())
    server = replace(parsers(), tools=own, auto=True)
    for strict in (False, True, True):
        tool = {"type": "function", "function": {**TIME["function"], "strict": strict}}
        assert server.turn(tools=[tool]).constrain(SamplingParams(), "").structured_outputs is None
        assert len(caplog.records) == strict
    (record,) = caplog.records
    assert "has no grammar of calls" in record.getMessage()
