"""Tool definitions and tool choices of a request, checked: from OpenAI's form to `Tool`s. Knows no parser."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frame.quoting import quoted

from ..config.errors import near
from ..interfaces.errors import RequestError
from ..interfaces.parser import Tool, json_type

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_CHOICES = "none, auto, required, {'type': 'function', …} and {'type': 'allowed_tools', …}"
_MAX_DEPTH = 32
#: Keywords that hold schemas, and those that hold schemas by name.
_SCHEMAS = frozenset(("items", "anyOf", "oneOf", "allOf", "additionalProperties"))
_NAMED_SCHEMAS = frozenset(("properties", "$defs", "definitions"))


@dataclass(frozen=True)
class ToolChoice:
    """The tools that the model may call, and whether it must call one or (`none`) may call none of them.

    `definitions` are the same tools in OpenAI's form, as the chat template gets them.
    """

    tools: tuple[Tool, ...]
    definitions: list[dict[str, Any]]
    must_call: bool = False
    none: bool = False


def read_tools(definitions: Sequence[Any] | None, choice: Any) -> ToolChoice:
    """The tools of a request under its tool choice; raises `RequestError` 400 naming the field."""
    given = [_read_tool(definition, f"tools[{position}]") for position, definition in enumerate(definitions or ())]
    names = [tool.name for tool in given]
    twice = next((name for position, name in enumerate(names) if name in names[:position]), None)
    if twice is not None:
        raise _wrong(f"tools holds two functions called {quoted(twice)}", "tools")
    plain = [dict(definition) for definition in definitions or ()]
    if choice == "none":
        return ToolChoice(tuple(given), plain, none=True)
    if choice in (None, "auto", "required"):
        if choice == "required" and not given:
            raise _wrong("tool_choice 'required' needs tools", "tool_choice")
        return ToolChoice(tuple(given), plain, must_call=choice == "required")
    if not isinstance(choice, Mapping):
        raise _wrong(f"tool_choice must be one of {_CHOICES}, got {quoted(choice)}", "tool_choice")
    wanted, must_call = _read_choice(choice)
    for name in wanted:
        if name not in names:
            known = ", ".join(names[:20]) or "none"
            raise _wrong(
                f"tool_choice names no tool {quoted(name)}{near(name, names)}; there are: {known}", "tool_choice"
            )
    kept = [position for position, name in enumerate(names) if name in wanted]
    return ToolChoice(tuple(given[at] for at in kept), [plain[at] for at in kept], must_call=must_call)


def _read_choice(choice: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The names that a choice allows, and whether one of them must be called."""
    kind = choice.get("type", "function")
    if kind == "function":
        return [_read_name(choice, "tool_choice")], True
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        tools = inner.get("tools") if isinstance(inner, Mapping) else None
        mode = inner.get("mode", "auto") if isinstance(inner, Mapping) else None
        if not isinstance(tools, list) or not tools:
            raise _wrong("tool_choice.allowed_tools needs a list of tools", "tool_choice")
        if mode not in ("auto", "required"):
            raise _wrong(f"tool_choice.allowed_tools.mode must be auto or required, got {quoted(mode)}", "tool_choice")
        return [_read_name(tool, "tool_choice.allowed_tools.tools") for tool in tools], mode == "required"
    raise _wrong(f"tool_choice.type must be function or allowed_tools, got {quoted(kind)}", "tool_choice")


def _read_name(value: Any, where: str) -> str:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _wrong(f"{where} must name a function, got {quoted(value)}", where.partition(".")[0])
    return name


def _read_tool(definition: Any, where: str) -> Tool:
    kind = definition.get("type", "function") if isinstance(definition, Mapping) else type(definition).__name__
    function = definition.get("function") if isinstance(definition, Mapping) else None
    if kind != "function" or not isinstance(function, Mapping):
        raise _wrong(f"{where} must be {{'type': 'function', 'function': {{…}}}}, got type {quoted(kind)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{where}.function.name must be 1 to 64 letters, digits, '_', '-' or '.', got {quoted(name)}")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise _wrong(f"{where}.function.description must be text, got {quoted(description)}")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    _check_schema(parameters, f"{where}.function.parameters")
    return Tool(name, _with_json_types(parameters), description, bool(function.get("strict")))


def _with_json_types(schema: Any) -> Any:
    """The schema with JSON's type names in place of a programming language's (`int`, `dict`, …)."""
    if isinstance(schema, list):
        return [_with_json_types(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    kind = schema.get("type")
    if isinstance(kind, (str, list)):
        found["type"] = json_type(kind) if isinstance(kind, str) else [json_type(str(one)) for one in kind]
    for name in _SCHEMAS.intersection(schema):
        found[name] = _with_json_types(schema[name])
    for name in _NAMED_SCHEMAS.intersection(schema):
        if isinstance(schema[name], Mapping):
            found[name] = {key: _with_json_types(value) for key, value in schema[name].items()}
    return found


def _check_schema(schema: Any, where: str) -> None:
    """Refuses anything but the schema of an object; the grammar compiler checks the details."""
    if not isinstance(schema, Mapping):
        raise _wrong(f"{where} must be a JSON schema, got {quoted(schema)}")
    if json_type(str(schema.get("type", "object"))) != "object":
        raise _wrong(f"{where} must have type 'object', got {quoted(schema['type'])}")
    waiting: list[tuple[Any, str, int]] = [(schema, where, 0)]
    while waiting:
        one, place, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise _wrong(f"{where} is nested deeper than {_MAX_DEPTH} schemas")
        if isinstance(one, bool):
            continue
        if not isinstance(one, Mapping):
            raise _wrong(f"{place} must be a JSON schema, got {quoted(one)}")
        _check_type(one.get("type"), place)
        _check_required(one.get("required"), place)
        for key in _NAMED_SCHEMAS.intersection(one):
            if not isinstance(one[key], Mapping) and (one[key] is not None or key == "properties"):
                raise _wrong(f"{place}.{key} must map names to schemas, got {quoted(one[key])}")
        properties = one.get("properties", {})
        waiting += [(inner, f"{place}.properties.{name}", depth + 1) for name, inner in properties.items()]
        if isinstance(one.get("items"), (Mapping, str, int)):
            waiting.append((one["items"], f"{place}.items", depth + 1))


def _check_type(kind: Any, where: str) -> None:
    kinds = kind if isinstance(kind, list) else [] if kind is None else [kind]
    for one in kinds:
        if not isinstance(one, str) or json_type(one) not in _TYPES:
            raise _wrong(f"{where}.type must be one of {', '.join(_TYPES)}, got {quoted(one)}")


def _check_required(required: Any, where: str) -> None:
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise _wrong(f"{where}.required must be a list of names, got {quoted(required)}")


def _wrong(message: str, param: str = "tools") -> RequestError:
    return RequestError(400, message, param=param)
