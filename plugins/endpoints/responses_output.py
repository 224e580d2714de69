"""Output items of the Responses API, built event by event. Knows no store and no tool server."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from frame.interfaces import CallArguments, CallBegin, Content, OutputEvent, Reasoning

Object = dict[str, Any]


class OutputItems:
    """The items of a response. `labels` maps functions that this server runs to their tool servers.

    `feed` takes new output of one reply and `finish` ends the reply; both return events without sequence numbers.
    White space alone begins no message. Calls that this server runs stay open until `answered`.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.items: list[Object] = []
        #: calls of the newest reply: for the client, and (`server_calls`) for this server to run
        self.calls: list[Object] = []
        self.server_calls: list[Object] = []
        self._labels = labels
        self._open: Object | None = None
        self._space = ""

    def begin_reply(self) -> None:
        """Starts a new reply: forgets the calls of the previous one."""
        self.calls, self.server_calls = [], []

    def feed(self, events: Iterable[OutputEvent], logprobs: Sequence[Any] = ()) -> list[Object]:
        """Takes new output of the model; `logprobs` belong to the first text in it."""
        found: list[Object] = []
        for each in events:
            match each:
                case Content():
                    found += self._text(each.text, logprobs)
                    logprobs = ()
                case Reasoning():
                    found += self._reasoning(each.text)
                case CallBegin():
                    found += self._begin_call(each)
                case CallArguments():
                    found += self._arguments(each.text)
                case _:
                    found += self._close("completed")
        return found

    def finish(self, complete: bool) -> list[Object]:
        """Ends the reply; `complete` is False when it was cut off."""
        found: list[Object] = []
        if self._space and not self.items:
            found += self._begin_message()
            found += self._text(self._space, ())
        self._space = ""
        return found + self._close("completed" if complete else "incomplete")

    def add(self, item: Object, kind: str) -> list[Object]:
        """Adds an item that is complete at once; its events are named `response.KIND.…`."""
        found = self._close("completed") + self._added(item)
        self._open = None
        return [
            *found,
            self._event(item, f"response.{kind}.in_progress"),
            self._event(item, f"response.{kind}.completed"),
            self._done(item),
        ]

    def answered(self, call: Object, output: str | None, error: str | None) -> list[Object]:
        """Gives a call that this server ran its result or error."""
        call["status"] = "completed" if error is None else "failed"
        call["output"] = output
        call["error"] = None if error is None else {"type": "mcp_tool_execution_error", "content": error}
        ending = "completed" if error is None else "failed"
        return [self._event(call, f"response.mcp_call.{ending}"), self._done(call)]

    def _text(self, text: str, logprobs: Sequence[Any]) -> list[Object]:
        found: list[Object] = []
        if self._open is None or self._open["type"] != "message":
            self._space += text
            if not self._space.strip():
                return []
            text, self._space = self._space, ""
            found += self._begin_message()
        item = self._open
        if item is None:
            return found
        part = item["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        delta = self._event(item, "response.output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))
        return [*found, delta]

    def _begin_message(self) -> list[Object]:
        item: Object = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        found = self._close("completed") + self._added(item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        found.append(self._event(item, "response.content_part.added", content_index=0, part=_copy(part)))
        item["content"].append(part)
        return found

    def _reasoning(self, text: str) -> list[Object]:
        found: list[Object] = []
        if self._open is None or self._open["type"] != "reasoning":
            begun: Object = {
                "id": f"rs_{uuid.uuid4().hex}",
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
            found += self._close("completed") + self._added(begun)
            part = {"type": "reasoning_text", "text": ""}
            found.append(self._event(begun, "response.content_part.added", content_index=0, part=_copy(part)))
            begun["content"].append(part)
        item = self._open
        if item is None:
            return found
        item["content"][0]["text"] += text
        return [*found, self._event(item, "response.reasoning_text.delta", content_index=0, delta=text)]

    def _begin_call(self, call: CallBegin) -> list[Object]:
        found = self._close("completed")
        self._space = ""
        label = self._labels.get(call.name)
        common: Object = {"name": call.name, "arguments": "", "status": "in_progress"}
        if label is None:
            name = call.id or f"call_{uuid.uuid4().hex}"
            item: Object = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": name, **common}
            self.calls.append(item)
            return found + self._added(item)
        item = {"id": f"mcp_{uuid.uuid4().hex}", "type": "mcp_call", "server_label": label, **common}
        self.server_calls.append(item)
        return [*found, *self._added(item), self._event(item, "response.mcp_call.in_progress")]

    def _arguments(self, text: str) -> list[Object]:
        item = self._open
        if item is None:
            return []
        item["arguments"] += text
        return [self._event(item, f"{_argument_events(item)}.delta", delta=text)]

    def _close(self, status: str) -> list[Object]:
        item, self._open = self._open, None
        if item is None:
            return []
        if item["type"] in ("function_call", "mcp_call"):
            done = self._event(item, f"{_argument_events(item)}.done", arguments=item["arguments"])
            if item["type"] == "mcp_call" and status == "completed":
                return [done]
            item["status"] = status
            return [done, self._done(item)]
        item["status"] = status
        part = item["content"][0]
        found: list[Object] = []
        if item["type"] == "message":
            fields = {"text": part["text"], "logprobs": part["logprobs"]}
            found.append(self._event(item, "response.output_text.done", content_index=0, **fields))
        else:
            found.append(self._event(item, "response.reasoning_text.done", content_index=0, text=part["text"]))
        found.append(self._event(item, "response.content_part.done", content_index=0, part=_copy(part)))
        return [*found, self._done(item)]

    def _added(self, item: Object) -> list[Object]:
        self.items.append(item)
        self._open = item
        index = len(self.items) - 1
        return [{"type": "response.output_item.added", "output_index": index, "item": _copy(item)}]

    def _done(self, item: Object) -> Object:
        return {"type": "response.output_item.done", "output_index": self._index(item), "item": _copy(item)}

    def _event(self, item: Object, kind: str, **fields: Any) -> Object:
        return {"type": kind, "item_id": item["id"], "output_index": self._index(item), **fields}

    def _index(self, item: Object) -> int:
        return next(index for index, each in enumerate(self.items) if each is item)


def _argument_events(item: Object) -> str:
    kind = "function_call" if item["type"] == "function_call" else "mcp_call"
    return f"response.{kind}_arguments"


def _copy(item: Object) -> Object:
    """A copy of an item for an event, which later changes of the item do not reach."""
    content = item.get("content")
    return {**item, "content": [dict(part) for part in content]} if content is not None else dict(item)
