"""The turn of one request: which parsers run, what they need of the tokens, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from frame import SamplingParams
from frame.core.config.tree import FrameConfig
from frame.core.front.output_parsers import OutputParsers
from frame.core.front.tools import read_tools
from frame.core.interfaces.errors import RequestError
from frame.core.plugin_host.registry import Registry
from frame.interfaces import ParserRequest, ParserSetup, StructuredOutputsParams, Tool
from frame.plugins.endpoints.chat_messages import message_for_template

F, G = ({"type": "function", "function": {"name": name}} for name in "fg")
VOCABULARY = ["<|channel|>", "<|message|>", "[TOOL_CALLS]", "[THINK]", "<|call|>"]


def parsers(tools: str | None = None, reasoning: str | None = None, render: Any = None, **fields: Any) -> OutputParsers:
    registry, config = Registry.load(), FrameConfig()

    def make(kind: str, name: str | None) -> Any:
        return registry.make(kind, name, ParserSetup(render), config) if name else None

    return OutputParsers(
        tools=make("tool-parser", tools),
        reasoning=make("reasoning-parser", reasoning),
        forced=make("tool-parser", "json"),
        token_id=lambda text: VOCABULARY.index(text) if text in VOCABULARY else None,
        encode=lambda text: list(text.encode()),
        **{"auto": tools is not None, **fields},
    )


def completion(text: str, reason: str | None = "stop", index: int = 0) -> Any:
    return SimpleNamespace(index=index, text=text, token_ids=[1], finish_reason=reason)


def test_auto_needs_a_parser() -> None:
    with pytest.raises(RequestError, match="writes no tool calls that could be found; name their format"):
        parsers(auto=True).turn(tools=[F])
    with pytest.raises(RequestError, match="--no-enable-auto-tool-choice"):
        parsers("hermes", auto=False).turn(tools=[F], tool_choice="auto")
    found = parsers("hermes").tools
    assert parsers(auto=True, find_tools=lambda: found).turn(tools=[F]).tools == [F]
    assert parsers(exclude_when_none=False).turn(tools=[F], tool_choice="none").tools == [F]
    assert parsers().turn(tools=[F], tool_choice="none").tools is None
    assert parsers("hermes").turn(tools=[F]).tools == [F]
    assert parsers().turn().tools is None


def held(turn: Any, **constraint: Any) -> Any:
    """The structural tag that a turn makes of a constraint, if it does."""
    asked = StructuredOutputsParams(**constraint) if constraint else None
    found = turn.constrain(SamplingParams(structured_outputs=asked), "").structured_outputs
    return found and (json.loads(found.structural_tag)["format"] if found.structural_tag else found)


def render(messages: Any, **_: Any) -> str:
    calls = messages[-1].get("tool_calls") or ()
    objects = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
    return messages[-1]["content"] + "\n".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in objects)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}


def test_a_grammar_of_the_text_also_allows_calls() -> None:
    text, calls = held(parsers("hermes", render=render).turn(tools=[F]), json=SCHEMA)["elements"]
    assert text == {"type": "json_schema", "json_schema": SCHEMA}
    assert calls["elements"][0]["tags"][0]["begin"].startswith("<tool_call>")
    turn = parsers("hermes").turn(tools=[F])  # no template: calls are a list, as demanded ones are
    assert held(turn, json_object=True)["elements"][1]["elements"][0]["value"] == "["
    turn.read(completion('[{"name": "f", "parameters": {}}]'))
    assert [call.name for call in turn.message().calls] == ["f"]
    for options in ({}, {"tools": [F], "tool_choice": "none"}):
        assert held(parsers("hermes").turn(**options), json=SCHEMA).json == SCHEMA


def test_the_grammar_enforces_the_schemas_of_strict_tools() -> None:
    form = held(parsers("hermes", render=render).turn(tools=[STRICT, G]))
    assert form["triggers"] == ["<tool_call>"]
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [SCHEMA, {"type": "object"}]
    assert held(parsers("hermes", render=render).turn(tools=[F, G])) is None


def test_gpt_oss_applies_the_format_to_its_final_message() -> None:
    turn = parsers("openai").turn(tools=[F])
    found = held(turn, json=SCHEMA)
    assert found.json == SCHEMA
    assert bytes(found.start_after).decode() == "<|channel|>final<|message|>"
    turn = parsers("openai").turn(tools=[F], tool_choice="required")
    assert "parameters" in str(held(turn).json)
    turn.read(
        completion(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            '[{"name": "f", "parameters": {"n": 1}}]'
        )
    )
    (call,) = turn.message().calls
    assert (turn.message().reasoning, call.name, call.arguments) == ("Hm.", "f", '{"n": 1}')


def test_allowed_tools_leave_the_others_out() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert parsers("hermes").turn(tools=[F, G], tool_choice=choice).tools == [G]
    for wrong in ({"type": "allowed_tools"}, {"type": "custom"}, {"type": "allowed_tools", "tools": [{"a": 1}]}):
        with pytest.raises(RequestError, match="tool_choice"):
            parsers("hermes").turn(tools=[F, G], tool_choice=wrong)


def test_markers_that_are_special_tokens_stay_in_the_text() -> None:
    def kept(*names: str | None, **options: Any) -> Any:
        return parsers(*names).turn(**options).constrain(SamplingParams(), "").kept_special_token_ids

    assert kept("openai", tools=[F]) == [0, 1, 4]
    assert kept("openai") == [0, 1, 4]
    assert kept("mistral", tools=[F]) == [2]
    assert kept("mistral", "mistral", tools=[F]) == [2, 3]
    assert kept("mistral", "mistral") == [3]
    assert kept("mistral") is None
    shown = parsers("mistral").turn(tools=[F]).constrain(SamplingParams(skip_special_tokens=False), "")
    assert shown.kept_special_token_ids is None


def test_a_parser_that_reads_reasoning_runs_alone() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f"
        "<|message|>{}<|call|>"
    )
    for options in ({"tools": [F]}, {}):
        turn = parsers("openai", "openai_gptoss").turn(**options)
        turn.read(completion(text))
        assert turn.message().reasoning == "Hm."
        assert [call.name for call in turn.message().calls] == ["f"] * len(options)
        assert turn.num_reasoning_tokens() == 3
    assert turn.message().content == "{}"


def test_call_ids_have_the_form_of_the_model() -> None:
    turn = parsers("mistral").turn(tools=[F])
    turn.read(completion('[TOOL_CALLS]f{"a": 1}'))
    (call,) = turn.message().calls
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_finish_reasons() -> None:
    said = "<tool_call>\n" + '{"name": "f", "arguments": {}}'
    for reason, want in (("stop", "tool_calls"), ("length", "length"), (None, None)):
        turn = parsers("hermes").turn(tools=[F])
        one = completion(said, reason)
        turn.read(one)
        assert turn.finish_reason(one) == want
    turn = parsers("hermes").turn(tools=[F])
    one = completion("no call")
    turn.read(one)
    assert turn.finish_reason(one) == "stop"


def test_the_outputs_of_a_request_are_read_apart() -> None:
    turn = parsers("hermes").turn(tools=[F])
    turn.read(completion("<tool_", None, 0))
    turn.read(completion("b", None, 1))
    turn.read(completion('call>{"name": "f"}', "stop", 0))
    turn.read(completion("c", "stop", 1))
    assert [call.name for call in turn.message(0).calls] == ["f"]
    assert turn.message(1).content == "bc"


def test_types_of_arguments() -> None:
    schema = {
        "a": {"type": "string"}, "b": {"type": ["integer", "null"]}, "c": {"enum": ["x", "y"]}, "d": {"const": "x"},
        "e": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "f": {"oneOf": [{"type": "string"}, {}]}, "g": {},
        "h": True,
    }  # fmt: skip
    tool = Tool("f", {"properties": schema})
    found = ["/".join(sorted(tool.types_of(name))) for name in [*schema, "other"]]
    assert found == ["string", "integer/null", "string", "string", "null/string", "", "", "", ""]
    assert ParserRequest(tools=(tool,)).tool("g") is None


def test_types_of_programming_languages_are_those_of_json() -> None:
    parameters = {
        "type": "dict",
        "properties": {"a": {"type": "float"}, "b": {"type": ["int", "null"]}, "c": {"items": {"type": "str"}}},
        "default": {"type": "float"},
    }
    (tool,) = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], None).tools
    assert tool.parameters == {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": ["integer", "null"]}, "c": {"items": {"type": "string"}}},
        "default": {"type": "float"},
    }


def test_reasoning_that_a_call_ends_counts_up_to_the_call() -> None:
    turn = parsers("hermes", "qwen3").turn(tools=[F])
    turn.read(completion('<think>Hm.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'))
    assert (turn.message().reasoning, [call.name for call in turn.message().calls]) == ("Hm.", ["f"])
    assert turn.num_reasoning_tokens() == 3


def test_messages_give_templates_their_reasoning_under_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        found = message_for_template({"role": "assistant", "content": "a", name: "hm"})
        assert (found["reasoning"], found["reasoning_content"]) == ("hm", "hm")
    assert message_for_template({"role": "user", "content": "a"}) == {"role": "user", "content": "a"}


def test_reasoning_tokens_are_those_before_the_end() -> None:
    """The end is one token here, so that nothing is tokenised again."""

    def counted(*pieces: tuple[str, list[int]]) -> int:
        chosen = parsers(None, "qwen3")
        turn = replace(chosen, encode=lambda text: [77]).turn()
        for number, (text, ids) in enumerate(pieces):
            one = completion(text, "stop" if number == len(pieces) - 1 else None)
            one.token_ids = ids
            turn.read(one)
        return turn.num_reasoning_tokens()

    assert counted(("<think>a b</think>c", [1, 2, 3, 77, 4])) == 3
    assert counted(("<think>", [1]), ("a b", [2, 3]), ("</think>c", [77, 4]), ("d", [77])) == 3
    assert counted(("<think>a b c", [1, 2, 3, 4])) == 4
    assert counted(("no reasoning </think>", [1, 2, 77])) == 0
