"""Renders a chat template with calls of known names and values, to find out its format. Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .scan import JsonSpan, Scan

FIRST, SECOND = "probe_alpha", "probe_beta"
TEXT_KEY, TEXT, NUMBER_KEY, NUMBER = "probe_text", "probe value", "probe_number", 4711
CONTENT = "⁂ probe content ⁂"


def bodies(render: Callable[..., str], several: bool = True) -> tuple[str, str]:
    """The template's texts of an answer with one call and of one with two; raises `ValueError`.

    Without `several`, a template that refuses two calls gives the text of one call twice.
    """

    def text(calls: Sequence[str], content: str = "") -> str:
        answer: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            answer["tool_calls"] = [_call(name, position) for position, name in enumerate(calls)]
        messages = [{"role": "user", "content": "probe"}, answer]
        return render(messages, tools=[_tool(FIRST), _tool(SECOND)], add_generation_prompt=False)

    try:
        plain, one = text((), CONTENT), text((FIRST,))
        try:
            two = text((FIRST, SECOND))
        except ValueError:
            if several:
                raise
            two = one
    except ValueError as error:
        raise ValueError(f"tool parser 'template' cannot use the chat template: {error}") from error
    begin = min(common_length(plain, one), common_length(plain, two))
    end = min(len(common_end(plain[begin:], one[begin:])), len(common_end(plain[begin:], two[begin:])))
    if FIRST not in one[begin:]:
        raise ValueError("tool parser 'template': the chat template writes no tool calls; name another parser")
    return one[begin : len(one) - end], two[begin : len(two) - end]


def _tool(name: str) -> dict[str, Any]:
    properties = {TEXT_KEY: {"type": "string"}, NUMBER_KEY: {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "probe", "parameters": parameters}}


def _call(name: str, position: int) -> dict[str, Any]:
    arguments = {TEXT_KEY: TEXT, NUMBER_KEY: NUMBER}
    return {"id": f"probecal{position}", "type": "function", "function": {"name": name, "arguments": arguments}}


def common_length(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(first), len(second)))


def common_end(first: str, second: str) -> str:
    return first[len(first) - common_length(first[::-1], second[::-1]) :]


def json_end(text: str, start: int) -> int:
    """Where the JSON value that starts at `start` ends."""
    scan = Scan()
    scan.feed(text[start:])
    JsonSpan().take(scan)
    return start + scan.at
