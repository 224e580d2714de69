"""Turns chats into prompts.

Checks messages, renders the chat template, and tokenises so that message content cannot produce control tokens.

Templates run in the transformers library's sandbox (immutable, no private attributes). Knows no model and no request.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .prompts import InvalidRequest, ParsedPrompt
from .tokenizer import Tokenizer

ContentFormat = Literal["auto", "string", "openai"]

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_ROLE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_RESERVED = frozenset(
    (
        "chat_template", "conversation", "messages", "tools", "documents", "tokenize", "padding", "truncation",
        "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
        "sanitize_control_tokens", "add_generation_prompt", "continue_final_message",
    )
)  # fmt: skip


class ChatTemplateError(InvalidRequest):
    """The chat cannot be rendered: no template, a broken one, or one that refuses these messages."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a chat becomes a prompt. `chat_template` is a template, a file, or None for the default one."""

    chat_template: str | None = None
    content_format: ContentFormat = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Any] | None = None
    documents: Sequence[Mapping[str, str]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                "continue_final_message",
            )
        reserved = sorted(_RESERVED.intersection(self.template_kwargs))
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs")


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
    tokenizer: Tokenizer, messages: Sequence[Any], options: ChatOptions, check: Callable[[str], None] | None = None
) -> ParsedPrompt:
    """One conversation as a prompt with text and ids. Changes nothing it is given; raises `InvalidRequest`.

    `check` may refuse the text before it is tokenised.
    """
    checked = [_check_message(message, position, options.content_format) for position, message in enumerate(messages)]
    if not checked:
        raise InvalidRequest("a chat needs at least one message", "messages")
    template = read_template(options.chat_template)
    if template is None and not tokenizer.hf.chat_template:
        raise ChatTemplateError("the tokenizer has no chat template: pass one as 'chat_template'", "chat_template")
    arguments: dict[str, Any] = dict(
        options.template_kwargs,
        tools=list(options.tools) if options.tools else None,
        documents=list(options.documents) if options.documents else None,
        chat_template=template,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
    )
    text = _apply(tokenizer, checked, tokenize=False, **arguments)
    if check is not None:
        check(text)
    written = [checked, arguments["tools"], arguments["documents"], options.template_kwargs]
    forged = _holds_special_text(tokenizer, written)
    if forged and "sanitize_control_tokens" in inspect.signature(tokenizer.hf.apply_chat_template).parameters:
        ids = _apply(tokenizer, checked, tokenize=True, return_dict=False, sanitize_control_tokens=True, **arguments)
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    return ParsedPrompt(text=text, token_ids=np.array(ids, np.int64))


def _apply(tokenizer: Tokenizer, messages: list[dict[str, Any]], **arguments: Any) -> Any:
    try:
        return tokenizer.hf.apply_chat_template(messages, **arguments)
    except InvalidRequest:
        raise
    except Exception as error:  # a template may raise anything; the message of its author is what helps
        raise ChatTemplateError(f"the chat template cannot render these messages: {error}", "messages") from error


def _holds_special_text(tokenizer: Tokenizer, value: Any) -> bool:
    """Whether any text inside `value` contains a special token, which only the template may write."""
    if isinstance(value, str):
        return tokenizer.special_text.search(value) is not None
    if isinstance(value, Mapping):
        return any(_holds_special_text(tokenizer, item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_special_text(tokenizer, item) for item in value)
    return False


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
