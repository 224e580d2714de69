"""Input items of the Responses API as a chat that a template can render. Knows no store and no tool server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from frame.interfaces import RequestError
from frame.quoting import quoted

Object = dict[str, Any]

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text",
          "reasoning_text": "text"}  # fmt: skip
_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "mcp_call", "mcp_list_tools")


def wrong(where: str, text: str) -> RequestError:
    """The refusal of an item."""
    return RequestError(400, f"{where} {text}", param="input")


def as_items(value: str | list[Object]) -> list[Object]:
    """`input` as items, whichever form it has."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


def read_items(items: Iterable[Mapping[str, Any]]) -> list[Object]:
    """Items as chat messages; raises `RequestError` that names an item which is not accepted.

    Consecutive reasoning, text and calls become one message of the assistant.
    """
    chat = _Chat()
    for number, item in enumerate(items):
        chat.add(item, f"input.{number}")
    return chat.messages


class _Chat:
    def __init__(self) -> None:
        self.messages: list[Object] = []
        self._open: Object | None = None  # the assistant's message that further items extend

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(_string(item, "call_id", where), item, where)
            case "function_call_output":
                self._result(_string(item, "call_id", where), _output(item.get("output"), where))
            case "reasoning":
                self._reasoning(item, where)
            case "mcp_call":
                name = _string(item, "id", where)
                self._call(name, item, where)
                error = item.get("error")
                self._result(name, _output(item.get("output") or (str(error) if error else ""), where))
            case "mcp_list_tools":
                pass
            case _:
                raise wrong(where, f"has type {quoted(kind)}, which is not accepted; there are: {', '.join(_ITEMS)}")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise wrong(where, f"has role {quoted(item.get('role'))}; there are: {', '.join(_ROLES)}")
        content = item.get("content")
        if role != "assistant":
            self._open = None
            self.messages.append({"role": role, "content": _content(content, where)})
            return
        message = self._assistant()
        if message.get("content") or message.get("tool_calls"):
            self._open = None
            message = self._assistant()
        message["content"] = _text(content, where)

    def _call(self, call_id: str, item: Mapping[str, Any], where: str) -> None:
        function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _result(self, call_id: str, text: str) -> None:
        self._open = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        parts = item.get("content") or item.get("summary") or []
        if not parts and item.get("encrypted_content"):
            raise wrong(where, "holds encrypted reasoning, which this server cannot read")
        self._open = None
        message = self._assistant()
        message["reasoning"] = message["reasoning_content"] = _text(parts, where)

    def _assistant(self) -> Object:
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
            self.messages.append(self._open)
        return self._open


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "must be text")
    return value


def _content(content: Any, where: str) -> str | list[Object]:
    """Text where all parts are text, else parts as chat completions have them."""
    if isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") == "input_image" for part in content
    ):
        return [_part(part, f"{where}.content.{number}") for number, part in enumerate(content)]
    return _text(content, where)


def _part(part: Any, where: str) -> Object:
    if isinstance(part, dict) and part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": _string(part, "image_url", where)}}
    return {"type": "text", "text": _text([part], where)}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(f"{where}.content", "must be text or a list of parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXTS:
            there = ", ".join(("input_text", "output_text", "refusal", "input_image"))
            raise wrong(
                f"{where}.content.{number}", f"has type {quoted(kind)}, which is not accepted; there are: {there}"
            )
        texts.append(_string(part, _TEXTS[str(kind)], f"{where}.content.{number}"))
    return "\n".join(texts)


def _output(value: Any, where: str) -> str:
    return value if isinstance(value, str) else _text(value, where)
