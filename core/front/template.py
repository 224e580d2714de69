"""Turns chats into prompts: the tokenizer renders them, with the chat template that a setting or a client gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from frame.quoting import quoted

from ..interfaces.tokenizer import ChatOptions, Tokenizer
from .prompts import InvalidRequest, ParsedPrompt


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
            f"chat template {quoted(value)} is neither a template nor a readable file: {reason}", "chat_template"
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
    options = replace(options, chat_template=read_template(options.chat_template))
    if options.chat_template is None and not tokenizer.chat_template:
        raise ChatTemplateError("the tokenizer has no chat template: pass one as 'chat_template'", "chat_template")
    try:
        text, ids = tokenizer.render_chat(messages, options, check)
    except InvalidRequest:
        raise
    except Exception as error:  # a template may raise anything; the message of its author is what helps
        raise ChatTemplateError(f"the chat template cannot render these messages: {error}", "messages") from error
    return ParsedPrompt(text=text, token_ids=np.array(ids, np.int64))
