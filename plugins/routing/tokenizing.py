"""What a server's /tokenize is asked for, and what it answers. frame and vLLM have the same."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

#: Longest body that is worth it, and most tokens of an answer.
_MOST_BYTES, _MOST_TOKENS = 1 << 20, 1 << 20
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: The fields that decide the tokens of a prompt.
_FIELDS = {
    _CHAT: (
        "model", "messages", "tools", "add_special_tokens", "add_generation_prompt", "continue_final_message",
        "chat_template_kwargs",
    ),
    _COMPLETIONS: ("model", "prompt", "add_special_tokens"),
}  # fmt: skip


class _Answer(msgspec.Struct):
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], msgspec.Meta(max_length=_MOST_TOKENS)]


_ANSWERS = msgspec.json.Decoder(_Answer)


def given_tokens(content: dict[str, Any]) -> Sequence[int] | None:
    """The ids where a client sends those in place of a text."""
    prompt = content.get("prompt", content.get("input_ids"))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not prompt or len(prompt) > _MOST_TOKENS:
        return None
    try:
        return array("I", prompt)
    except (TypeError, OverflowError):
        return None


def tokenize_body(path: str, content: dict[str, Any]) -> bytes | None:
    """The body to ask with; None for a prompt that is no text alone."""
    names = _FIELDS.get(path)
    if names is None:
        return None
    body = {name: content[name] for name in names if content.get(name) is not None}
    if path == _CHAT:
        if not _is_text(body.get("messages")):
            return None
    else:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = body["prompt"] = prompt[0]
        if not isinstance(prompt, str):
            return None
    encoded = msgspec.json.encode(body)
    return encoded if len(encoded) <= _MOST_BYTES else None


def _is_text(messages: Any) -> bool:
    """Whether messages have no images or sounds, which a server would fetch and read to tokenise them."""
    if not isinstance(messages, list) or not messages:
        return False
    for message in messages:
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            return False
    return True


def read_tokens(answer: bytes | None) -> Sequence[int] | None:
    """The tokens that a server has said; None where it has not."""
    try:
        return None if answer is None else _ANSWERS.decode(answer).tokens
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
