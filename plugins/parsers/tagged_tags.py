"""Grammars of calls whose arguments stand between tags, as structural tags. Knows no model's tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from frame.interfaces import CallTags, ParserRequest, StructuredOutputsParams, Tool

from .tagged_calls import TaggedFormat

Format = dict[str, Any]

#: Keywords of a text's schema that tags cannot enforce, because the text stands between them without quotes.
_UNENFORCED_ON_TEXT = frozenset(("pattern", "minLength", "maxLength", "format", "allOf", "not"))
#: Keywords of the schema of all arguments that tags cannot enforce.
_UNENFORCED_ON_ARGUMENTS = frozenset(
    ("anyOf", "oneOf", "allOf", "not", "$ref", "patternProperties", "minProperties", "dependentRequired")
)
#: Keywords that restrict a value whose schema names no type.
_UNTYPED = frozenset(("$ref", "anyOf", "oneOf", "allOf", "enum", "const"))


def demanded_calls(calls: CallTags, request: ParserRequest) -> StructuredOutputsParams | None:
    """The grammar of answers that are `calls` of strict tools; None where tags cannot enforce the schema of a value."""
    if not all(_can_obey(tool) for tool in request.tools):
        return None
    several = {"type": "tags_with_separator", "tags": calls.tags, "separator": calls.separator, "at_least_one": True,
               "stop_after_first": not request.parallel}  # fmt: skip
    return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": several}))


def _can_obey(tool: Tool) -> bool:
    """Whether tags can enforce the schema of each argument's value, and the schema allows no other arguments."""
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    if tool.parameters.get("additionalProperties") or _UNENFORCED_ON_ARGUMENTS.intersection(tool.parameters):
        return False
    if not set(required) <= set(properties):
        return False
    return not any(
        isinstance(schema, Mapping) and is_text(tool, key) and _UNENFORCED_ON_TEXT.intersection(_keywords(schema))
        for key, schema in properties.items()
    )


def _keywords(schema: Mapping[str, Any]) -> set[str]:
    """The keywords of a schema and of the alternatives in its anyOf and oneOf."""
    unions = [schema.get(name) for name in ("anyOf", "oneOf")]
    branches = [each for union in unions if isinstance(union, list) for each in union if isinstance(each, Mapping)]
    return set(schema).union(*map(_keywords, branches))


def is_text(tool: Tool, key: str) -> bool:
    """Whether the value of an argument is written as text: the schema calls it text, or says nothing of it."""
    if kinds := tool.types_of(key):
        return "string" in kinds
    schema = tool.parameters["properties"][key]
    return not (isinstance(schema, Mapping) and _UNTYPED.intersection(schema))


def tagged_tags(form: TaggedFormat, tools: Sequence[Tool]) -> CallTags:
    """Calls of these tools, each part on a line of its own; arguments of strict tools in the order of their schemas.

    A value of type text is any text, or one of its enumeration; other values are JSON that obeys the schema. Arguments
    of tools that are not strict are free text.
    """
    opener = f"{form.opener[0]}{form.line}" if form.opener else ""
    end = form.line.join((form.end, *form.closers))
    tags = []
    for tool in tools:
        head = f"{opener}{form.begin[0]}{tool.name}{form.attributes}{form.name_end}{form.line}"
        content = _arguments(form, tool) if tool.strict else {"type": "any_text"}
        tags.append({"type": "tag", "begin": head, "content": content, "end": end})
    return CallTags(tags=tags, trigger=(form.opener or form.begin)[0], separator=form.line)


def _arguments(form: TaggedFormat, tool: Tool) -> Format:
    properties = tool.parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = tool.parameters.get("required") or ()
    written = [_argument(form, tool, key, schema, key in required) for key, schema in properties.items()]
    return {"type": "sequence", "elements": written} if written else {"type": "const_string", "value": ""}


def _argument(form: TaggedFormat, tool: Tool, key: str, schema: Any, required: bool) -> Format:
    key_end = form.key_end_of(tool.types_of(key), is_text(tool, key))
    line = "\n" if form.padding else ""
    begin = f"{form.key_begin}{key}{key_end}" + (f"{form.line}{form.value_begin}" if form.value_begin else "") + line
    return at_most_one(begin, value_content(tool, key, schema), f"{line}{form.end_of(key)}{form.line}", required)


def value_content(tool: Tool, key: str, schema: Any) -> Format:
    """What may stand between the tags of an argument."""
    values = (
        schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, Mapping) else None
    )
    if not is_text(tool, key):
        definitions = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        return {"type": "json_schema", "json_schema": {**schema, **definitions}}
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return {"type": "or", "elements": [{"type": "const_string", "value": value} for value in values]}
    return {"type": "any_text"}


def at_most_one(begin: str, content: Format, end: str, required: bool) -> Format:
    """A tag that stands there once; it may also be missing, unless it is required."""
    tag = {"type": "tag", "begin": begin, "content": content, "end": end}
    return {"type": "tags_with_separator", "tags": [tag], "separator": "", "at_least_one": required,
            "stop_after_first": True}  # fmt: skip
