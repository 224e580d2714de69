"""Grammars of calls whose arguments stand in braces, as structural tags. Knows no model's markers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from frame.interfaces import CallTags, Tool

from .braced_calls import BracedFormat
from .tagged_tags import Format, at_most_one, is_text, value_content

_PLAIN_KEY = re.compile(r"[\w.\-]+")


def plain_keys(tools: Sequence[Tool]) -> bool:
    """Whether all keys of the tools can be written without marks."""
    return all(_PLAIN_KEY.fullmatch(key) for tool in tools for key in tool.parameters.get("properties") or {})


def braced_tags(form: BracedFormat, tools: Sequence[Tool]) -> CallTags:
    """Calls of these tools; arguments of strict tools in the order of their schemas.

    A value of type text is any text between marks, or one of its enumeration; other values are JSON that obeys the
    schema. Arguments of tools that are not strict are free text.
    """
    tags = [
        {
            "type": "tag",
            "begin": f"{form.begin[0]}{tool.name}{{",
            "content": _arguments(form, tool) if tool.strict else {"type": "any_text"},
            "end": f"}}{form.end}",
        }
        for tool in tools
    ]
    return CallTags(tags=tags, trigger=form.begin[0], separator="")


def _arguments(form: BracedFormat, tool: Tool) -> Format:
    """Arguments with commas between them: alternatives by which of them is the first that is written."""
    properties = tool.parameters.get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    required = set(tool.parameters.get("required") or ())
    ways: list[Format] = []
    for at, name in enumerate(names):
        rest = [_argument(form, tool, other, ",", other in required) for other in names[at + 1 :]]
        ways.append({"type": "sequence", "elements": [_argument(form, tool, name, "", True), *rest]})
        if name in required:
            break
    else:
        ways.append({"type": "const_string", "value": ""})
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def _argument(form: BracedFormat, tool: Tool, key: str, comma: str, required: bool) -> Format:
    quote = form.quote if is_text(tool, key) else ""
    content = value_content(tool, key, tool.parameters["properties"][key])
    return at_most_one(f"{comma}{key}:{quote}", content, quote, required)
