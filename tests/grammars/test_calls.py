"""Answers that a grammar holds and that may call: what it lets through, as whole outputs."""

from __future__ import annotations

import pytest

from frame.core.config.flat import from_flat
from frame.core.front.call_formats import text_or_calls, text_with_calls
from frame.core.front.vocabulary import TokenizerVocabulary
from frame.interfaces import StructuredOutputsParams, Tool
from frame.plugins.grammars.guidance import GuidanceBackend
from frame.plugins.parsers.call_tags import BLANK, NUMBERED, CallShape
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
    vocabulary = TokenizerVocabulary(tokenizers.byte_level(), 400, [2])
    made = GuidanceBackend(config=from_flat({}), vocabulary=vocabulary)
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
