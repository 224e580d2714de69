"""The prompt of a request as bytes: those of two requests begin alike where their prompts do."""

from __future__ import annotations

from struct import Struct
from typing import Any

import msgspec

from frame.interfaces import RouteRequest

#: Fields that stand before the rest of a prompt, or decide all of it, in this order.
_HEAD = ("model", "cache_salt", "tools", "chat_template_kwargs", "reasoning_effort", "instructions", "system")
#: The fields with the rest; a request has one of them.
_REST = ("messages", "prompt", "input", "inputs", "text")
#: Bytes of a piece of a prompt, and those that count as a token.
PIECE_BYTES, TOKEN_BYTES = 512, 4
_PIECE = Struct(f"{PIECE_BYTES}s")
#: Only so many bytes of a prompt are looked at, and only bodies of so many: to read one holds up all others.
MOST_BYTES, MOST_BODY_BYTES = 1 << 19, 2 << 20


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
    return found[:MOST_BYTES]


def piece_keys(data: bytes) -> list[int]:
    """A key for the end of each whole piece, that stands for all bytes up to there."""
    key, whole = 0, len(data) // PIECE_BYTES * PIECE_BYTES
    return [key := hash((key, piece)) for (piece,) in _PIECE.iter_unpack(memoryview(data)[:whole])]
