"""Converts parser events to OpenAI's messages and deltas. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frame.interfaces import AssistantMessage, CallArguments, CallBegin, Content, OutputEvent, Reasoning

from .openai_answers import ChatCall, ChatMessage, Delta, DeltaCall, Function


def whole_message(role: str, echo: str, said: AssistantMessage) -> ChatMessage:
    """A complete message, after the echoed text. Its content is null when there are only calls or reasoning."""
    calls = [ChatCall(call.id, Function(call.name, call.arguments)) for call in said.calls]
    content = echo + said.content
    message = ChatMessage(role, content if content or not (calls or said.reasoning) else None)
    if calls:
        message.tool_calls = calls
    if said.reasoning:
        message.reasoning = message.reasoning_content = said.reasoning
    return message


def message_for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a request with its reasoning under both names, as templates know one or the other."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return {**message, "reasoning": reasoning, "reasoning_content": reasoning} if reasoning else message


def delta_of(events: Sequence[OutputEvent]) -> Delta:
    """Events as one piece of a message."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, DeltaCall] = {}
    for event in events:
        match event:
            case Content():
                content.append(event.text)
            case Reasoning():
                reasoning.append(event.text)
            case CallBegin():
                calls[event.index] = DeltaCall(event.index, Function(event.name, ""), event.id, "function")
            case CallArguments():
                call = calls.setdefault(event.index, DeltaCall(event.index, Function()))
                call.function.arguments = (call.function.arguments or "") + event.text
    delta = Delta(content="".join(content) or None, reasoning="".join(reasoning) or None)
    delta.reasoning_content = delta.reasoning
    if calls:
        delta.tool_calls = list(calls.values())
    return delta
