"""Reads the messages of a chat as chat templates expect them, and refuses what they must not get."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from frame.interfaces import ChatOptions, InvalidRequest
from frame.quoting import quoted

#: Type of a content part → its field that holds the text.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_ROLE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def read_messages(messages: Sequence[Any], options: ChatOptions) -> list[dict[str, Any]]:
    """Copies of the messages: their content is text, or text parts where the template takes those (openai)."""
    if options.add_generation_prompt and options.continue_final_message:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
            "continue_final_message",
        )
    as_parts = options.content_format == "openai"
    if not messages:
        raise InvalidRequest("a chat needs at least one message", "messages")
    return [_read_message(message, f"messages[{position}]", as_parts) for position, message in enumerate(messages)]


def _read_message(message: Any, where: str, as_parts: bool) -> dict[str, Any]:
    """A copy of `message` for the template: plain content, tool arguments as objects."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"{where} must be an object with role and content, got {type(message).__name__}", "messages"
        )
    role = message.get("role")
    # templates paste the role between control characters, so it must not be able to close them
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(
            f"{where}.role must be a name of letters, digits, '_', '-' and '.', got {quoted(role)}", "messages"
        )
    checked = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if content is None:
        if not (message.get("tool_calls") or role == "assistant"):
            raise InvalidRequest(f"{where}.content is missing", "messages")
        checked["content"] = ""
    elif not isinstance(content, str):
        texts = _read_parts(content, where)
        checked["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    elif as_parts:
        checked["content"] = [{"type": "text", "text": content}]
    if checked.get("tool_calls"):
        checked["tool_calls"] = [_read_call(call, where) for call in checked["tool_calls"]]
    return checked


def _read_parts(content: Any, where: str) -> list[str]:
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(
            f"{where}.content must be text or a list of parts, got {type(content).__name__}", "messages"
        )
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(_TEXT_PARTS[kind]) if isinstance(part, Mapping) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{where}.content holds a part of type {quoted(kind)} that this model cannot take; there are: "
                f"{', '.join(_TEXT_PARTS)}",
                "messages",
            )
        texts.append(text)
    return texts


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its JSON arguments parsed, as templates expect; arguments that are not JSON stay text."""
    if not isinstance(call, Mapping):
        raise InvalidRequest(f"{where}.tool_calls must hold objects, got {type(call).__name__}", "messages")
    copy = dict(call)
    function = copy.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = function["arguments"]
        copy["function"] = {**function, "arguments": arguments}
    return copy
