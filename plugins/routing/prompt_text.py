"""The prompt of a request as bytes: those of two requests begin alike where their prompts do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from frame.interfaces import RouteRequest

#: Fields that stand before the rest of a prompt, or decide all of it, in this order.
_HEAD = ("model", "cache_salt", "tools", "chat_template_kwargs", "reasoning_effort", "instructions", "system")
#: The fields with the rest; a request has one of them.
_REST = ("messages", "prompt", "input", "inputs", "text")
#: Only so many bytes of a prompt are looked at, and only bodies of so many: to read one holds up all others.
_MOST_BYTES, MOST_BODY_BYTES = 1 << 19, 2 << 20


def prompt_content(request: RouteRequest) -> dict[str, Any] | None:
    """The body of a request, which may have a prompt; None for one that has none, and one that is too large."""
    return request.content if len(request.body) <= MOST_BODY_BYTES else None


def prompt_bytes(content: dict[str, Any] | None) -> bytes:
    """Empty for a request without a prompt."""
    if content is None:
        return b""
    rest = next((content[name] for name in _REST if content.get(name)), None)
    if rest is None:
        return b""
    head = [content.get(name) for name in _HEAD]
    try:
        found = msgspec.json.encode(head) + (rest.encode() if isinstance(rest, str) else msgspec.json.encode(rest))
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):  # half of a surrogate pair
        return b""
    return found[:_MOST_BYTES]


def piece_keys(data: bytes, size: int) -> Iterator[int]:
    """A key for the end of each whole piece of `size` bytes, that stands for all bytes up to there."""
    key = 0
    for start in range(0, len(data) - size + 1, size):
        key = hash((key, data[start : start + size]))
        yield key
