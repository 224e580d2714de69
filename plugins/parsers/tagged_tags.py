"""Grammars of calls whose arguments stand between tags, as structural tags. Knows no model's tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frame.interfaces import CallTags, Tool

from .tagged_calls import TaggedFormat

Format = dict[str, Any]


def tagged_tags(form: TaggedFormat, tools: Sequence[Tool]) -> CallTags:
    """Calls of these tools, each part on a line of its own; arguments of strict tools in the order of their schemas.

    A value of type text is any text, or one of its enumeration; other values are JSON that obeys the schema. Arguments
    of tools that are not strict are free text.
    """
    opener = f"{form.opener[0]}\n" if form.opener else ""
    end = "\n".join((form.end, *form.closers[:1]))
    tags = []
    for tool in tools:
        head = f"{opener}{form.begin[0]}{tool.name}{form.name_end}\n"
        content = _arguments(form, tool) if tool.strict else {"type": "any_text"}
        tags.append({"type": "tag", "begin": head, "content": content, "end": end})
    return CallTags(tags=tags, trigger=(form.opener or form.begin)[0], separator="\n")


def _arguments(form: TaggedFormat, tool: Tool) -> Format:
    properties = tool.parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = tool.parameters.get("required") or ()
    written = [_argument(form, tool, key, schema, key in required) for key, schema in properties.items()]
    return {"type": "sequence", "elements": written} if written else {"type": "const_string", "value": ""}


def _argument(form: TaggedFormat, tool: Tool, key: str, schema: Any, required: bool) -> Format:
    kinds = tool.types_of(key)
    is_text = not kinds or "string" in kinds
    values = (
        schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, Mapping) else None
    )
    content: Format = {"type": "any_text"}
    if is_text and values and all(isinstance(value, str) for value in values):
        content = {"type": "or", "elements": [{"type": "const_string", "value": value} for value in values]}
    elif not is_text:
        definitions = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        content = {"type": "json_schema", "json_schema": {**schema, **definitions}}
    key_end = next((end for end, text in form.typed_key_ends if text == is_text), form.key_end)
    line = "\n" if form.padding else ""
    begin = f"{form.key_begin}{key}{key_end}" + (f"\n{form.value_begin}" if form.value_begin else "") + line
    tag = {"type": "tag", "begin": begin, "content": content, "end": f"{line}{form.value_end}\n"}
    return {"type": "tags_with_separator", "tags": [tag], "separator": "", "at_least_one": required,
            "stop_after_first": True}  # fmt: skip
