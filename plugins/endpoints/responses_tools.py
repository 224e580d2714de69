"""Converts tools and tool choices of the Responses API to those of chat completions. Knows no tool server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frame.interfaces import RequestError
from frame.quoting import quoted

Object = dict[str, Any]

#: Type of a built-in tool → labels of the tool servers that can run it, in order of preference.
BUILT_IN: Mapping[str, tuple[str, ...]] = {
    "mcp": (),
    "code_interpreter": ("code_interpreter", "python"),
    "web_search": ("web_search", "browser"),
    "web_search_preview": ("web_search_preview", "web_search", "browser"),
}


def function_of(tool: Mapping[str, Any], where: str) -> Object:
    """A function tool in the form of chat completions."""
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(400, f"{where}.name must be text", param="tools")
    function: Object = {"name": name, "parameters": tool.get("parameters") or {}}
    for field in ("description", "strict"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    return {"type": "function", "function": function}


def shown_tool(tool: Mapping[str, Any]) -> Object:
    """A tool as the response shows it: without secrets, with the fields that its type must have."""
    hidden = {name: value for name, value in tool.items() if name not in ("authorization", "headers")}
    return {"strict": None, "parameters": None, **hidden} if tool.get("type") == "function" else hidden


def choice_of(choice: Any, names: Sequence[str], server_tools: Mapping[str, Sequence[str]]) -> tuple[Any, set[str]]:
    """The choice in the form of chat completions, and the allowed names. `server_tools`: label → names."""
    allowed = set(names)
    if not isinstance(choice, dict):
        return choice, allowed
    kind = choice.get("type")
    if kind == "allowed_tools":
        wanted = {str(tool.get("name")) for tool in choice.get("tools") or () if isinstance(tool, dict)}
        mode = "required" if choice.get("mode") == "required" else "auto"
        return mode, allowed & wanted
    name = choice.get("name")
    if kind == "mcp":
        of_server = server_tools.get(str(choice.get("server_label")), ())
        if name is None:
            return "required", allowed & set(of_server)
    elif kind != "function":
        raise RequestError(400, f"tool_choice of type {quoted(kind)} is not served", param="tool_choice")
    if name not in allowed:
        raise RequestError(400, f"tool_choice names {quoted(name)}, which is not in tools", param="tool_choice")
    return {"type": "function", "function": {"name": name}}, allowed
