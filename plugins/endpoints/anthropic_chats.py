"""Anthropic's conversations as chats that a template can render: blocks become text, tool calls and tool results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from frame.interfaces import RequestError
from frame.quoting import quoted

from .anthropic_bodies import AnthropicMessage, ConversationBody, Object
from .replies import Conversation

_BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")


def read_conversation(body: ConversationBody) -> Conversation:
    """The conversation of a body; raises `RequestError` that names a block which is not accepted."""
    messages = list(_messages(body))
    last = messages[-1]
    prefilled = last["role"] == "assistant" and bool(last.get("content")) and not last.get("tool_calls")
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    choice = body.tool_choice
    return Conversation(
        messages=messages,
        tools=[_function(tool.name, tool.description, tool.input_schema, tool.strict) for tool in body.tools or ()],
        tool_choice=_choice(body),
        parallel=choice is None or not choice.disable_parallel_tool_use,
        template_kwargs=kwargs,
        continue_final_message=prefilled,
    )


def _function(name: str, description: str, schema: Object, strict: bool) -> Object:
    function: Object = {"name": name, "description": description, "parameters": schema}
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(body: ConversationBody) -> Any:
    choice = body.tool_choice
    if choice is None or not body.tools:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


def _messages(body: ConversationBody) -> Iterator[Object]:
    if body.system:
        system = body.system
        yield {"role": "system", "content": system if isinstance(system, str) else _text(system, "system")}
    for position, message in enumerate(body.messages):
        where = f"messages.{position}.content"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _said(message.content, where)
        elif message.role == "system":
            yield {"role": "system", "content": _text(message.content, where)}
        else:
            yield from _asked(message, where)


def _asked(message: AnthropicMessage, where: str) -> Iterator[Object]:
    """Results of tools come first, each as a message of its own, then what the user says."""
    parts: list[Object] = []
    blocks: list[Any] = list(message.content)
    if not blocks:
        raise RequestError(400, f"{where}.content must hold at least one block", param="messages")
    for number, block in enumerate(blocks):
        place = f"{where}.{number}"
        kind = _kind(block, place, ("text", "image", "tool_result"))
        if kind == "tool_result":
            content = block.get("content") or ""
            text = content if isinstance(content, str) else _text(content, f"{place}.content")
            yield {"role": "tool", "tool_call_id": _string(block, "tool_use_id", place), "content": text}
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {"url": _image(block, place)}})
        else:
            parts.append({"type": "text", "text": _string(block, "text", place)})
    if parts:
        texts = [part["text"] for part in parts if part["type"] == "text"]
        yield {"role": "user", "content": "\n".join(texts) if len(texts) == len(parts) else parts}


def _said(blocks: Iterable[Any], where: str) -> Object:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    for number, block in enumerate(blocks):
        place = f"{where}.{number}"
        kind = _kind(block, place, ("text", "tool_use", "thinking", "redacted_thinking"))
        if kind == "text":
            texts.append(_string(block, "text", place))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", place))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise RequestError(400, f"{place}.input must be an object", param="messages")
            function = {"name": _string(block, "name", place), "arguments": arguments}
            calls.append({"id": _string(block, "id", place), "type": "function", "function": function})
    message: Object = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(blocks: Iterable[Any], where: str) -> str:
    texts = []
    for number, block in enumerate(blocks):
        _kind(block, f"{where}.{number}", ("text",))
        texts.append(_string(block, "text", f"{where}.{number}"))
    return "\n".join(texts)


def _kind(block: Any, where: str, kinds: tuple[str, ...]) -> str:
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    if kind not in kinds:
        known = "" if kind not in _BLOCKS else " at this place"
        there = f"there are: {', '.join(kinds)}"
        raise RequestError(400, f"{where}: type {quoted(kind)} is not accepted{known}; {there}", param="messages")
    return str(kind)


def _string(block: Object, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(400, f"{where}.{name} must be text", param="messages")
    return value


def _image(block: Object, where: str) -> str:
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{_string(source, 'media_type', where)};base64,{_string(source, 'data', where)}"
    if isinstance(source, dict) and source.get("type") == "url":
        return _string(source, "url", where)
    raise RequestError(400, f"{where}.source must be of type base64 or url", param="messages")
