"""Calls as a plain JSON list, for models whose own format has no grammar: what a demanded call is written as."""

from __future__ import annotations

from typing import Any

from frame import StructuredOutputsParams
from frame.interfaces import CallTags, OutputReader, ParserRequest, ToolParser

from .call_tags import BLANK, CallShape
from .json_calls import JsonCallReader


def calls_schema(request: ParserRequest) -> dict[str, Any]:
    """The JSON schema of a list of calls: at least one, each of an offered function with arguments that it takes.

    Definitions inside a tool's schema move up, so that their references hold; those of equal name must be equal.
    """
    definitions: dict[str, Any] = {}
    items = []
    for tool in request.tools:
        parameters = dict(tool.parameters) or {"type": "object"}
        parameters.setdefault("type", "object")
        for key in ("$defs", "definitions"):
            for name, definition in (parameters.pop(key, None) or {}).items():
                definitions.setdefault(key, {})[name] = definition
        items.append({
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        })  # fmt: skip
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items} if len(items) > 1 else items[0]}
    if not request.parallel or len(items) == 1:
        schema["maxItems"] = 1
    return {**schema, **definitions}


class JsonListParser(ToolParser):
    """`[{"name": …, "parameters": {…}}, …]` as the whole output."""

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of the list."""
        return JsonCallReader(request, bare=True)

    def call_tags(self, request: ParserRequest) -> CallTags:
        """An object for each tool, in a list."""
        shape = CallShape("[", f'{{"name": "{BLANK}", "parameters": ', "}", ", " if request.parallel else None, "]")
        return shape.tags(request.tools)

    def constraint(self, request: ParserRequest) -> StructuredOutputsParams | None:
        """The list as a schema, without white space: some models would write nothing else."""
        return StructuredOutputsParams(json=calls_schema(request), disable_any_whitespace=True)
