"""Anthropic's `context_management`: accepts edits that would do nothing and refuses others by name.

The server clears nothing from a conversation; an edit whose condition is not met would not have changed it either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from frame.quoting import quoted

Object = Mapping[str, Any]

#: What is kept, and the input tokens from which an edit happens, where a request does not say.
_KEPT_TOOL_USES, _KEPT_THINKING_TURNS = 3, 1
_CLEAR_FROM, _COMPACT_FROM = 100_000, 150_000


def refusal_of_edits(value: Object, messages: Sequence[Any], max_input_tokens: int | None) -> str | None:
    """Why the edits are refused; None where none would change the conversation."""
    edits = value.get("edits") or []
    if not isinstance(edits, list):
        return "context_management.edits must be a list"
    for place, edit in enumerate(edits):
        where = f"context_management.edits.{place}"
        kind = edit.get("type") if isinstance(edit, Mapping) else None
        idle = _IDLE.get(str(kind))
        if idle is None:
            return f"{where} has type {quoted(kind)}, which is not served; there are: {', '.join(_IDLE)}"
        if not idle(edit, messages, max_input_tokens):
            return (
                f"{where} ({kind}) would change the conversation, which this server uses as it is sent: edit it first"
            )
    return None


def _clears_no_tool_use(edit: Object, messages: Sequence[Any], longest: int | None) -> bool:
    num_uses = sum(_count(message, ("tool_use",)) for message in messages)
    trigger = _part(edit, "trigger")
    if trigger.get("type") == "tool_uses":
        reached = num_uses >= _number(trigger, 0)
    else:
        reached = longest is None or _number(trigger, _CLEAR_FROM) <= longest
    return not reached or num_uses <= _number(_part(edit, "keep"), _KEPT_TOOL_USES)


def _clears_no_thinking(edit: Object, messages: Sequence[Any], longest: int | None) -> bool:
    del longest
    if edit.get("keep") == "all" or _part(edit, "keep").get("type") == "all":
        return True
    num_turns = sum(_count(message, ("thinking", "redacted_thinking")) > 0 for message in messages)
    return num_turns <= _number(_part(edit, "keep"), _KEPT_THINKING_TURNS)


def _compacts_nothing(edit: Object, messages: Sequence[Any], longest: int | None) -> bool:
    del messages
    return longest is not None and _number(_part(edit, "trigger"), _COMPACT_FROM) > longest


_IDLE: Mapping[str, Callable[[Object, Sequence[Any], int | None], bool]] = MappingProxyType({
    "clear_tool_uses_20250919": _clears_no_tool_use,
    "clear_thinking_20251015": _clears_no_thinking,
    "compact_20260112": _compacts_nothing,
})  # fmt: skip


def _count(message: Any, kinds: Sequence[str]) -> int:
    blocks = message.content if isinstance(message.content, list) and message.role == "assistant" else ()
    return sum(block.get("type") in kinds for block in blocks)


def _part(edit: Object, name: str) -> Object:
    value = edit.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(part: Object, default: int) -> int:
    value = part.get("value")
    return value if isinstance(value, int) else default
