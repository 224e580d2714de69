"""Answers that a grammar holds and that may call: what it lets through, as whole outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frame.core.config.flat import from_flat
from frame.core.config.tree import FrameConfig
from frame.core.front.call_formats import text_or_calls, text_with_calls
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import grammar_setup
from frame.interfaces import AssistantMessage, ParserRequest, ParserSetup, StructuredOutputsParams, Tool
from frame.plugins.grammars.guidance import GuidanceBackend
from frame.plugins.parsers.braced_calls import BracedFormat
from frame.plugins.parsers.call_tags import BLANK, NUMBERED, CallShape
from frame.plugins.parsers.tagged_calls import TaggedFormat
from frame.testing import tokenizers
from tests.grammars.test_structural_tags import accepts, pieces

ONE = {"properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
TOOLS = (Tool("f", ONE, strict=True), Tool("g", ONE))
SHAPES = {
    "tagged": CallShape("", f'<call>\n{{"name": "{BLANK}", "arguments": ', "}\n</call>", "\n", ""),
    "list": CallShape("<calls>[", f'{{"name": "{BLANK}", "arguments": ', "}", ", ", "]"),
    "bare": CallShape("", f'{{"name": "{BLANK}", "arguments": ', "}", None, ""),
    "numbered": CallShape("<calls>", f"<call>{NUMBERED}<sep>", "</call>", "", "</calls>"),
}


@pytest.fixture(scope="module")
def backend():
    vocabulary = tokenizers.vocabulary(400)
    made = GuidanceBackend(grammar_setup(from_flat({}), vocabulary))
    yield made
    made.close()


@pytest.fixture(scope="module")
def byte_of(backend):
    return {backend.vocabulary.token_bytes(token): token for token in range(5, 262)}


def answer(shape: CallShape, *calls: tuple[str, str]) -> str:
    return shape.opener + (shape.separator or "").join(shape.call(*call) for call in calls) + shape.closer


GOOD, LOOSE, BAD = ("f", '{"a": 1}'), ("g", '{"b": [2]}'), ("f", '{"a": 2}')


@pytest.mark.parametrize("name", SHAPES)
def test_text_in_a_format_or_a_call(backend, byte_of, name):
    shape = SHAPES[name]
    params = StructuredOutputsParams(json={"enum": [{"said": True}]})
    held = text_or_calls(params, shape.tags(TOOLS), parallel=True)
    good = ['{"said": true}', answer(shape, GOOD), answer(shape, LOOSE)]
    bad = ["Hello.", answer(shape, BAD), answer(shape, ("h", "{}")), '{"said": false}']
    (bad if shape.separator is None else good).append(answer(shape, GOOD, LOOSE))
    assert [text for text in good if not accepts(backend, byte_of, held, pieces(text))] == []
    assert [text for text in bad if accepts(backend, byte_of, held, pieces(text))] == []
    one = text_or_calls(params, shape.tags(TOOLS), parallel=False)
    assert not accepts(backend, byte_of, one, pieces(answer(shape, GOOD, LOOSE)))


@pytest.mark.parametrize("name", SHAPES)
def test_calls_of_strict_tools_obey_in_free_text(backend, byte_of, name):
    shape = SHAPES[name]
    held = text_with_calls(shape.tags(TOOLS), parallel=True)
    good = ["Hello {you}.", answer(shape, GOOD), "Look: " + answer(shape, LOOSE)]
    good += [answer(shape, GOOD, LOOSE)] if shape.separator is not None else []
    bad = [answer(shape, BAD), "Look: " + answer(shape, BAD), answer(shape, ("h", "{}"))]
    assert [text for text in good if not accepts(backend, byte_of, held, pieces(text))] == []
    assert [text for text in bad if accepts(backend, byte_of, held, pieces(text))] == []


@pytest.mark.parametrize(
    "params", [{"json_object": True}, {"regex": r"\{.*\}"}, {"choice": ["{}", "no"]}, {"grammar": 'root ::= "{}"'}]
)
def test_every_format_of_text_may_give_way_to_a_call(backend, byte_of, params):
    shape = SHAPES["tagged"]
    held = text_or_calls(StructuredOutputsParams(**params), shape.tags(TOOLS), parallel=True)
    for text in ("{}", answer(shape, GOOD)):
        assert accepts(backend, byte_of, held, pieces(text))
    assert not accepts(backend, byte_of, held, pieces("maybe"))


VALUES = {
    "properties": {
        "word": {"type": "string"},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "maximum": 9},
        "place": {"$ref": "#/$defs/place"},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
    },
    "required": ["kind", "age"],
    "$defs": {"place": {"type": "string"}, "row": {"type": "integer", "minimum": 5}},
}
TAGGED_TOOLS = (Tool("f", VALUES, strict=True), Tool("g", VALUES), Tool("h", strict=True))
GIVEN = {"word": "a < b\nc", "kind": "dog", "age": 3, "rows": [5, 6]}


def tagged(form: TaggedFormat, name: str, arguments: dict[str, Any]) -> str:
    """A call as the models write it."""
    line = "\n" if form.padding else ""
    text = f"{form.opener[0]}{form.line}" if form.opener else ""
    text += f"{form.begin[0]}{name}{form.attributes}{form.name_end}{form.line}"
    for key, value in arguments.items():
        kinds = {str: "string", int: "integer", list: "array"}
        end = form.key_end_of(frozenset((kinds[type(value)],)), isinstance(value, str))
        between = f"{form.line}{form.value_begin}" if form.value_begin else ""
        shown = value if isinstance(value, str) else json.dumps(value)
        text += f"{form.key_begin}{key}{end}{between}{line}{shown}{line}{form.end_of(key)}{form.line}"
    return text + form.line.join((form.end, *form.closers))


TAGGED = [
    "qwen3_coder", "glm45", "glm47", "minimax_m2", "seed_oss", "deepseek_v32", "deepseek_v4", "step3", "mimo",
    "kimi_k3", "minimax_m3",
]  # fmt: skip


@pytest.mark.parametrize("name", TAGGED)
def test_tagged_arguments_of_strict_tools_obey(backend, byte_of, name):
    parser = Registry.load().make("tool-parser", name, ParserSetup(), FrameConfig())
    request = ParserRequest(tools=TAGGED_TOOLS)
    held = text_with_calls(parser.call_tags(request), parallel=True)
    good = [("f", GIVEN), ("f", {"kind": "cat", "age": 0}), ("g", {"age": "x", "more": "y"}), ("g", {}), ("h", {})]
    bad = [("f", {"kind": "cow", "age": 3}), ("f", {"kind": "cat"}), ("f", {**GIVEN, "rows": [1]}), ("i", {})]
    written = [tagged(parser.form, *call) for call in good]
    assert [text for text in written if not accepts(backend, byte_of, held, pieces("Look. " + text))] == []
    wrong = [tagged(parser.form, *call) for call in bad]
    assert [text for text in wrong if accepts(backend, byte_of, held, pieces(text))] == []
    assert accepts(backend, byte_of, held, pieces(parser.form.line.join(written)))
    reader = parser.start(request)
    message = AssistantMessage()
    message.add([*reader.feed("\n".join(written)), *reader.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in message.calls][:2] == good[:2]
    either = text_or_calls(StructuredOutputsParams(json={"enum": [{"said": True}]}), parser.call_tags(request), True)
    assert [accepts(backend, byte_of, either, pieces(text)) for text in ('{"said": true}', *written[:2], "No.")] == [
        True, True, True, False,
    ]  # fmt: skip


def braced(form: BracedFormat, name: str, arguments: dict[str, Any]) -> str:
    """A call as Gemma writes it, but for a text whose schema is a reference."""
    values = (
        f"{key}:"
        + (f"{form.quote}{value}{form.quote}" if isinstance(value, str) and key != "place" else json.dumps(value))
        for key, value in arguments.items()
    )
    return f"{form.begin[0]}{name}{{{','.join(values)}}}{form.end}"


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_arguments_in_braces_of_strict_tools_obey(backend, byte_of, name):
    parser = Registry.load().make("tool-parser", name, ParserSetup(), FrameConfig())
    request = ParserRequest(tools=TAGGED_TOOLS)
    held = text_with_calls(parser.call_tags(request), parallel=True)
    good = [
        ("f", GIVEN), ("f", {"kind": "cat", "age": 0}), ("f", {"kind": "cat", "age": 1, "place": "x"}),
        ("g", {"age": "x", "more": "y"}), ("g", {}), ("h", {}),
    ]  # fmt: skip
    bad = [("f", {"kind": "cow", "age": 3}), ("f", {"kind": "cat"}), ("f", {**GIVEN, "rows": [1]}), ("i", {}),
           ("f", {"age": 3, "kind": "cat"})]  # fmt: skip
    written = [braced(parser.form, *call) for call in good]
    assert [text for text in written if not accepts(backend, byte_of, held, pieces("Look. " + text))] == []
    wrong = [braced(parser.form, *call) for call in bad]
    assert [text for text in wrong if accepts(backend, byte_of, held, pieces(text))] == []
    assert accepts(backend, byte_of, held, pieces("".join(written)))
    message = AssistantMessage()
    reader = parser.start(request)
    message.add([*reader.feed("".join(written)), *reader.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == good
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    optional = ParserRequest(tools=[Tool("f", {"properties": properties}, strict=True)])
    either = text_with_calls(parser.call_tags(optional), parallel=True)
    calls = [{}, {"a": "x"}, {"b": 1}, {"a": "x", "b": 1}]
    assert all(accepts(backend, byte_of, either, pieces(braced(parser.form, "f", each))) for each in calls)
    demanded = parser.constraint(optional)
    texts = (braced(parser.form, "f", {"b": 1}), "No.")
    assert [accepts(backend, byte_of, demanded, pieces(text)) for text in texts] == [True, False]
    odd = Tool("f", {"properties": {"a b": {"type": "integer"}}}, strict=True)
    assert parser.constraint(ParserRequest(tools=[odd])) is None
