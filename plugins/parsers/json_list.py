"""Calls as a plain JSON list: the format of demanded calls (`tool_choice`) where the model's own has no grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frame import StructuredOutputsParams
from frame.interfaces import CallTags, OutputReader, ParserRequest, ToolParser

from .call_tags import BLANK, CallShape
from .json_calls import JsonCallReader


def calls_schema(request: ParserRequest) -> dict[str, Any]:
    """The JSON schema of a list of calls: at least one, each of an offered function with arguments that it takes.

    Definitions inside a tool's schema are moved to the top level, where their references point; a definition whose
    name another tool uses differently is renamed.
    """
    definitions: dict[str, dict[str, Any]] = {}
    items = []
    for tool in request.tools:
        parameters = dict(tool.parameters) or {"type": "object"}
        parameters.setdefault("type", "object")
        own = {key: parameters.pop(key) or {} for key in ("$defs", "definitions") if key in parameters}
        moves: dict[str, str] = {}
        for key, named in own.items():
            there = definitions.setdefault(key, {})
            for name in [name for name, definition in named.items() if there.get(name, definition) != definition]:
                moves[_place(key, name)] = _place(key, _free_name(f"{tool.name}.{name}", {**there, **named}))
        parameters = _moved(parameters, moves)
        for key, named in own.items():
            for name, definition in named.items():
                place = _place(key, name)
                definitions[key][_name(moves.get(place, place))] = _moved(definition, moves)
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


def _place(key: str, name: str) -> str:
    """The JSON pointer of a definition, as in a `$ref`."""
    return f"#/{key}/{name.replace('~', '~0').replace('/', '~1')}"


def _name(place: str) -> str:
    return place.rpartition("/")[2].replace("~1", "/").replace("~0", "~")


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name += "_"
    return name


def _moved(schema: Any, moves: Mapping[str, str]) -> Any:
    """The schema with references to renamed definitions updated."""
    if not moves or not isinstance(schema, (dict, list)):
        return schema
    if isinstance(schema, list):
        return [_moved(each, moves) for each in schema]
    moved = {name: _moved(value, moves) for name, value in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str):
        old = next((old for old in moves if target == old or target.startswith(f"{old}/")), None)
        moved["$ref"] = target if old is None else moves[old] + target[len(old) :]
    return moved


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
        """The schema of the list, without white space, because some models would write white space without end."""
        return StructuredOutputsParams(json=calls_schema(request), disable_any_whitespace=True)
