"""Edits of Anthropic's `context_management`: which do nothing, and what is said of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frame.plugins.endpoints.anthropic_context import refusal_of_edits

USED = [
    SimpleNamespace(
        role="assistant", content=[{"type": "thinking", "thinking": "Hm."}, {"type": "tool_use", "id": str(n)}]
    )
    for n in range(4)
]
PLAIN = [SimpleNamespace(role="user", content="Hello."), SimpleNamespace(role="assistant", content="Hello.")]
TOOLS, THINKING, COMPACT = "clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"


def edit(kind: str, **fields: Any) -> dict[str, Any]:
    return {"edits": [{"type": kind, **fields}]}


def value(kind: str, number: int) -> dict[str, Any]:
    return {"type": kind, "value": number}


@pytest.mark.parametrize(
    ("given", "messages", "longest"),
    [
        ({}, USED, None),
        ({"edits": []}, USED, None),
        (edit(THINKING, keep="all"), USED, None),
        (edit(THINKING, keep=value("thinking_turns", 4)), USED, None),
        (edit(THINKING), PLAIN, None),
        (edit(TOOLS), USED[:3], None),
        (edit(TOOLS), USED, 32_768),
        (edit(TOOLS, keep=value("tool_uses", 4), trigger=value("tool_uses", 1)), USED, None),
        (edit(TOOLS, trigger=value("tool_uses", 9)), USED, None),
        (edit(COMPACT), USED, 100_000),
    ],
)
def test_edits_that_do_nothing_are_taken(given: Any, messages: Any, longest: int | None) -> None:
    assert refusal_of_edits(given, messages, longest) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (edit(THINKING), f"edits.0 ({THINKING}) would change the conversation"),
        (edit(TOOLS), f"edits.0 ({TOOLS}) would change"),
        (edit(TOOLS, trigger=value("tool_uses", 2)), "would change"),
        (edit(COMPACT), f"({COMPACT}) would change"),
        (edit("forget"), "has type 'forget', which is not served; there are: clear_tool_uses_20250919"),
        ({"edits": ["x"]}, "has type None"),
        ({"edits": "x"}, "context_management.edits must be a list"),
    ],
)
def test_edits_that_would_change_the_conversation_are_refused(given: Any, message: str) -> None:
    assert message in str(refusal_of_edits(given, USED, None))
