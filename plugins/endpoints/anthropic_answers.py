"""Answers of the Anthropic routes: content blocks, and the events that build them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from frame.anthropic_errors import event
from frame.interfaces import CallArguments, CallBegin, Content, OutputEvent, Reasoning


class Blocks:
    """The content blocks of an answer; `feed` and `finish` return the events that announce what was added.

    White space alone begins no text block, so that a line break before a call does not become one.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self.called = False
        self._open: str | None = None
        self._arguments: list[str] = []
        self._space = ""

    def feed(self, events: Iterable[OutputEvent]) -> list[bytes]:
        """Adds the events of new output."""
        frames: list[bytes] = []
        for each in events:
            match each:
                case Content():
                    frames += self._text(each.text)
                case Reasoning():
                    if self._open != "thinking":
                        frames += self._begin({"type": "thinking", "thinking": "", "signature": ""})
                    self.content[-1]["thinking"] += each.text
                    frames.append(self._delta("thinking_delta", thinking=each.text))
                case CallBegin():
                    self.called = True
                    name = each.id or f"toolu_{uuid.uuid4().hex}"
                    frames += self._begin({"type": "tool_use", "id": name, "name": each.name, "input": {}})
                case CallArguments():
                    self._arguments.append(each.text)
                    frames.append(self._delta("input_json_delta", partial_json=each.text))
                case _:
                    frames += self._close()
        return frames

    def finish(self) -> list[bytes]:
        """Called at the end of the answer: the events that close the last block."""
        frames: list[bytes] = []
        if not self.content and self._space:
            frames += self._begin({"type": "text", "text": ""})
            frames += self._text(self._space)
        return frames + self._close()

    def _text(self, text: str) -> list[bytes]:
        frames: list[bytes] = []
        if self._open != "text":
            self._space += text
            if not self._space.strip():
                return []
            text, self._space = self._space, ""
            frames += self._begin({"type": "text", "text": ""})
        self.content[-1]["text"] += text
        frames.append(self._delta("text_delta", text=text))
        return frames

    def _begin(self, block: dict[str, Any]) -> list[bytes]:
        frames = self._close()
        self._open = block["type"]
        self._space = ""
        frames.append(event("content_block_start", index=len(self.content), content_block=block))
        self.content.append(block)
        return frames

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return event("content_block_delta", index=len(self.content) - 1, delta={"type": kind, **fields})

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        if self._open == "tool_use":
            self.content[-1]["input"] = _arguments("".join(self._arguments))
            self._arguments.clear()
        self._open = None
        return [event("content_block_stop", index=len(self.content) - 1)]


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as a JSON object for `input`; text that is not one is put under `invalid_json`."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_json": text}


def stop_fields(finish_reason: str | None, stop_reason: int | str | None, called: bool) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence` of an answer."""
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}
