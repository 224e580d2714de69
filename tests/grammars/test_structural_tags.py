"""Structural tags: where free text ends and a grammar begins."""

from __future__ import annotations

import json

import numpy as np
import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.setups import grammar_setup
from frame.interfaces import StructuredOutputsParams
from frame.plugins.grammars.guidance import GuidanceBackend
from frame.testing import tokenizers

PET = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


def schema(value):
    return {"type": "json_schema", "json_schema": value}


def tag(begin, end, content=None):
    return {"type": "tag", "begin": begin, "content": content or schema(PET), "end": end}


def const(value):
    return {"type": "const_string", "value": value}


@pytest.fixture(scope="module")
def backend():
    vocabulary = tokenizers.vocabulary(400)
    made = GuidanceBackend(grammar_setup(from_flat({"disable_any_whitespace": True}), vocabulary))
    yield made
    made.close()


@pytest.fixture(scope="module")
def byte_of(backend):
    return {backend.vocabulary.token_bytes(token): token for token in range(5, 262)}


def accepts(backend, byte_of, params, text):
    """Whether a text, byte by byte (special tokens as ids), is a whole output."""
    matcher = backend.compile(backend.normalize(params)).matcher()
    for piece in text:
        token = piece if isinstance(piece, int) else byte_of[piece]
        if not matcher.advance(token):
            return False
    if matcher.finished:
        return True
    words = np.zeros((1, 13), np.int32)
    backend.fill_masks([matcher], words)
    return bool(words[0, 0] >> 2 & 1)


def pieces(text):
    return [bytes([byte]) for byte in text.encode()]


TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<fa>", "</f>"), tag("<fb>", ";", const("x"))]}
CASES = [
    (tag("<a>", "</a>"), ['<a>{"n":1}</a>'], ['<a>{"n":3}</a>', '<a>{"n":1}', '{"n":1}']),
    (tag("<a>", ["!", "?"], const("x")), ["<a>x!", "<a>x?"], ["<a>x.", "<a>x"]),
    (tag("<t>", "</t>", {"type": "any_text"}), ["<t></t>", "<t>a < b\n</t>"], ["<t>abc", "<t>a</t>b"]),
    (const("só"), ["só"], ["so", "só!"]),
    (schema(PET), ['{"n":2}'], ["{}"]),
    ({"type": "regex", "pattern": "a/b[0-9]"}, ["a/b7"], ["a/b"]),
    ({"type": "grammar", "grammar": 'root ::= "l" | "r"'}, ["l", "r"], ["x"]),
    ({"type": "any_text"}, ["", "anything {"], []),
    ({"type": "sequence", "elements": [const("a"), schema(PET), const("b")]}, ['a{"n":1}b'], ["ab"]),
    (
        {"type": "sequence", "elements": [{"type": "any_text"}, const("</think>"), schema(PET)]},
        ['well</think>{"n":1}', '</think>{"n":1}'],
        ["well</think>no", "well"],
    ),
    ({"type": "or", "elements": [const("a"), const("bc")]}, ["a", "bc"], ["b", "abc"]),
    (TRIGGERED, ["", "text", 'a<fa>{"n":1}</f>b', '<fa>{"n":1}</f><fb>x;'], ["a<fc>", "<fa>text</f>", "<f"]),
    ({**TRIGGERED, "at_least_one": True}, ['a<fa>{"n":1}</f>'], ["", "text"]),
    ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, ["a<fb>x;"], ["a<fb>x;b", "text"]),
    (
        {"type": "tags_with_separator", "tags": [tag("<", ">"), tag("[", "]", const("x"))], "separator": ", "},
        ["", '<{"n":1}>', "[x], [x]"],
        ["[x][x]", "[x], "],
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), CASES, ids=lambda value: str(value)[:50])
def test_formats(backend, byte_of, form, good, bad):
    params = StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": form}))
    for text in good:
        assert accepts(backend, byte_of, params, pieces(text)), text
    for text in bad:
        assert not accepts(backend, byte_of, params, pieces(text)), text


def test_the_older_form(backend, byte_of):
    older = {"structures": [{"begin": "<f>", "schema": PET, "end": "</f>"}], "triggers": ["<f"]}
    params = StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", **older}))
    assert accepts(backend, byte_of, params, pieces('so <f>{"n":1}</f> it is'))
    assert not accepts(backend, byte_of, params, pieces("so <f>{}"))


def test_special_tokens_are_those_tokens(backend, byte_of):
    """Text that looks like a special token is not one, and the other way round."""
    special = backend.vocabulary.special_tokens["<user>"]
    for form in (tag("<user>", "<assistant>", const("x")), tag("a<user>", "<assistant>", {"type": "any_text"})):
        params = StructuredOutputsParams(structural_tag=json.dumps({"format": form}))
        begin = pieces(form["begin"].removesuffix("<user>"))
        assert accepts(backend, byte_of, params, [*begin, special, b"x", special + 1])
        assert not accepts(backend, byte_of, params, [*pieces(form["begin"]), b"x", special + 1])


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("[]", "must be a JSON object"),
        ("{", "structural_tag is not JSON"),
        ({}, "needs format, or structures and triggers"),
        ({"format": {"type": "exec"}}, "must be one of const_string, json_schema, .*, got 'exec'"),
        ({"format": {"type": "tag", "begin": 1}}, "begin of a structural tag must be text, got 1"),
        ({"format": {"type": "or", "elements": []}}, "elements of a structural tag must be a non-empty list"),
        ({"format": {"type": "triggered_tags", "triggers": ["<x"], "tags": [tag("<a>", "")]}}, "none of its triggers"),
        ({"format": {"type": "triggered_tags", "triggers": [""], "tags": [tag("<a>", "")]}}, "must not be empty"),
        ({"structures": 5, "triggers": ["a"]}, "must be a list of objects"),
    ],
    ids=str,
)
def test_wrong_tags_are_refused(backend, tag, message):
    text = tag if isinstance(tag, str) else json.dumps(tag)
    with pytest.raises(ValueError, match=message):
        backend.normalize(StructuredOutputsParams(structural_tag=text))


def test_nesting_is_bounded(backend):
    form = const("a")
    for _ in range(70):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(ValueError, match="nest deeper than 64"):
        backend.normalize(StructuredOutputsParams(structural_tag=json.dumps({"format": form})))


def test_objects_are_closed_on_demand(backend, byte_of):
    open_schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}, "required": ["a"]}
    text = pieces('{"a":{"b":1}}')
    assert accepts(backend, byte_of, StructuredOutputsParams(json=open_schema), text)
    closed = StructuredOutputsParams(json=open_schema, disable_additional_properties=True)
    assert not accepts(backend, byte_of, closed, text)
    assert accepts(backend, byte_of, closed, pieces('{"a":{}}'))


@pytest.mark.parametrize(
    ("settings", "asked", "allowed"),
    [
        ({}, {}, {"none", "spaces"}),
        ({}, {"disable_any_whitespace": True}, {"none"}),
        ({"disable_any_whitespace": True}, {}, {"none"}),
        ({"any_whitespace": True}, {}, {"none", "spaces", "lines"}),
        ({"any_whitespace": True}, {"disable_any_whitespace": True}, {"none"}),
        ({}, {"whitespace_pattern": r"[ \n]{1,5}"}, {"none", "spaces", "lines"}),
    ],
)
def test_white_space_of_json_is_bounded(backend, byte_of, settings, asked, allowed):
    """By default nothing but a space after a comma and a colon, so that no model writes spaces for ever."""
    two = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}}, "required": ["a", "b"]}
    params = StructuredOutputsParams(json={**two, "additionalProperties": False}, **asked)
    made = GuidanceBackend(grammar_setup(from_flat(settings), backend.vocabulary))
    texts = {
        "none": '{"a":1,"b":2}', "spaces": '{"a": 1, "b": 2}', "lines": '{\n  "a": 1,\n  "b": 2\n}',
        "endless": '{"a": 1, ' + " " * 200 + '"b": 2}', "after": '{"a": 1, "b": 2}' + " " * 70,
    }  # fmt: skip
    assert {name for name, text in texts.items() if accepts(made, byte_of, params, pieces(text))} == allowed
    made.close()
