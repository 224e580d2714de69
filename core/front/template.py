"""Turns chats into prompts: checks messages, and has the tokenizer render them with a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..interfaces.tokenizer import ChatOptions, ContentFormat, Tokenizer
from .prompts import InvalidRequest, ParsedPrompt

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_ROLE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class ChatTemplateError(InvalidRequest):
    """The chat cannot be rendered: no template, a broken one, or one that refuses these messages."""


def read_template(value: str | None) -> str | None:
    """The template that a setting names: itself when it looks like one, else the content of that file."""
    if value is None or "{{" in value or "{%" in value:
        return value
    path = Path(value).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ChatTemplateError(
            f"chat template {value!r} is neither a template nor a readable file: {reason}", "chat_template"
        ) from None


def text_size(value: Any) -> int:
    """Characters of all text inside messages."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_size, value.values()))
    return sum(map(text_size, value)) if isinstance(value, (list, tuple)) else 0


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Any], options: ChatOptions, check: Callable[[str], None] = lambda _: None
) -> ParsedPrompt:
    """One conversation as a prompt with text and ids. Changes nothing it is given; raises `InvalidRequest`.

    `check` may refuse the text before it is tokenised.
    """
    checked = [_check_message(message, position, options.content_format) for position, message in enumerate(messages)]
    if not checked:
        raise InvalidRequest("a chat needs at least one message", "messages")
    options = replace(options, chat_template=read_template(options.chat_template))
    if options.chat_template is None and not tokenizer.chat_template:
        raise ChatTemplateError("the tokenizer has no chat template: pass one as 'chat_template'", "chat_template")
    try:
        text, ids = tokenizer.render_chat(checked, options, check)
    except InvalidRequest:
        raise
    except Exception as error:  # a template may raise anything; the message of its author is what helps
        raise ChatTemplateError(f"the chat template cannot render these messages: {error}", "messages") from error
    return ParsedPrompt(text=text, token_ids=np.array(ids, np.int64))


def _check_message(message: Any, position: int, content_format: ContentFormat) -> dict[str, Any]:
    """A copy of `message` for the template: plain content, tool arguments as objects."""
    where = f"messages[{position}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"{where} must be an object with role and content, got {type(message).__name__}", "messages"
        )
    role = message.get("role")
    # templates paste the role between control characters, so it must not be able to close them
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(
            f"{where}.role must be a name of letters, digits, '_', '-' and '.', got {role!r}", "messages"
        )
    checked = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if content is None:
        if not (message.get("tool_calls") or role == "assistant"):
            raise InvalidRequest(f"{where}.content is missing", "messages")
        checked["content"] = ""
    elif not isinstance(content, str):
        texts = _read_parts(content, where)
        as_parts = content_format == "openai"
        checked["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    elif content_format == "openai":
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
                f"{where}.content holds a part of type {kind!r} that this model cannot take; there are: "
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
