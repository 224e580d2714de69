"""Writes constraints of requests in llguidance's notation: JSON with Lark text or a schema for each part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from frame import StructuredOutputsParams

#: Runs of white space are bounded, because some models would write white space without end.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_OBJECT_KEYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


#: Regular expressions of separators that one space may follow.
_SEPARATORS = {"item_separator": ",[ ]?", "key_separator": ":[ ]?"}


class Whitespace(Enum):
    """White space between the parts of JSON: none, a space after commas and colons, or any in bounded runs."""

    NONE = "none"
    ONE_LINE = "one line"
    ANY = "any"


@dataclass(frozen=True)
class Style:
    """How JSON is written, and which texts are special tokens (text → id)."""

    whitespace: Whitespace = Whitespace.ONE_LINE
    whitespace_pattern: str | None = None
    additional_properties: bool = True
    special_tokens: Mapping[str, int] = field(default_factory=dict)


def in_notation(params: StructuredOutputsParams, style: Style) -> str:
    """The constraint in llguidance's notation; raises `ValueError` that names the field."""
    from .structural_tags import tag_grammars

    if params.json is not None:
        return _grammars([schema_grammar(parse_json(params.json, "json"), style)])
    if params.json_object:
        return _grammars([schema_grammar({"type": "object"}, style)])
    if params.choice is not None:
        return _grammars([{"lark_grammar": "start: " + " | ".join(literal(each) for each in params.choice)}])
    if params.regex is not None:
        return _grammars([regex_grammar(params.regex)])
    if params.grammar is not None:
        return _grammars([text_grammar(params.grammar)])
    if params.structural_tag is not None:
        return _grammars(tag_grammars(parse_json(params.structural_tag, "structural_tag"), style))
    raise ValueError("structured_outputs has no constraint")


def _grammars(parts: list[dict[str, Any]]) -> str:
    return json.dumps({"grammars": parts})


def parse_json(value: Any, name: str) -> Any:
    """A value, parsed where it is JSON text; raises `ValueError` that names the field."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"structured_outputs.{name} is not JSON: {error}") from None


def literal(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def schema_grammar(schema: Any, style: Style) -> dict[str, Any]:
    """A JSON schema in the notation."""
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a JSON schema must be an object, got {json.dumps(schema)[:80]}")
    if schema is True or schema == {}:
        schema = {}
    elif schema is False:
        raise ValueError("the JSON schema false allows nothing")
    if not style.additional_properties:
        schema = close_objects(schema)
    pattern = style.whitespace_pattern
    own = schema.get("x-guidance") if isinstance(schema.get("x-guidance"), dict) else {}
    options: dict[str, Any] = {
        "whitespace_flexible": style.whitespace is Whitespace.ANY,
        "whitespace_pattern": _WHITESPACE,
        **(_SEPARATORS if style.whitespace is Whitespace.ONE_LINE else {}),
        **own,
    }
    if pattern is not None:
        options.update(whitespace_flexible=True, whitespace_pattern=pattern)
    if options["whitespace_flexible"]:
        options = {name: value for name, value in options.items() if name not in _SEPARATORS}
    else:
        del options["whitespace_pattern"]
    return {"json_schema": {**schema, "x-guidance": options}}


def close_objects(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in objects that say nothing about further properties."""
    if isinstance(schema, list):
        return [close_objects(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        # examples and constants are values, even where they look like schemas
        name: value if name in ("const", "enum", "default", "examples") else close_objects(value)
        for name, value in schema.items()
    }
    is_object = schema.get("type") == "object" or isinstance(schema.get("properties"), dict)
    if is_object and not any(name in schema for name in _OBJECT_KEYS):
        closed["additionalProperties"] = False
    return closed


def regex_grammar(pattern: str) -> dict[str, Any]:
    """A regular expression in the notation; it must match the whole text."""
    from llguidance import regex_to_lark

    return {"lark_grammar": f"start: /{regex_to_lark(pattern, use_ascii='')}/"}


def text_grammar(text: str) -> dict[str, Any]:
    """Lark, or GBNF (the EBNF of llama.cpp), in the notation."""
    from llguidance import grammar_from

    return {"lark_grammar": grammar_from("grammar", text)}
