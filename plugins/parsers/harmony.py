"""Harmony, the format of gpt-oss: reasoning, answer and calls are messages with channels.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
<|message|>{…}<|call|>` and `<|channel|>final<|message|>…<|return|>`. The token that ends an output is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from frame.interfaces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    OutputEvent,
    OutputReader,
    ParserRequest,
    Reasoning,
    ReasoningParser,
    ToolParser,
)

from .calls import NAME
from .scan import JsonSpan, Markers, Scan, Stops

SPECIAL_TOKENS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
_HEADS = Markers(("<|start|>", "<|channel|>", "<|message|>"))
_BODY = Markers(("<|message|>",))
_ENDS = Markers(("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"))
_STOPS = Stops(_ENDS.texts)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEAD = 1024
FINAL = "<|channel|>final<|message|>"


class HarmonyReader(OutputReader):
    """Reads messages. With `calls`, messages to functions are tool calls; without, they are content."""

    def __init__(self, calls: bool) -> None:
        self._calls = calls
        self._scan = Scan()
        self._state = self._outside
        self._events: list[OutputEvent] = []
        self._head = ""
        self._kind: type[Content] | type[Reasoning] = Content
        self._said: set[type[OutputEvent]] = set()
        self._fresh = self._loose = False
        self._num_calls = 0
        self._span: JsonSpan | None = None

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        """Takes new text."""
        del token_ids
        if text:
            self._scan.feed(text)
            self._run()
        return self._taken()

    def finish(self) -> list[OutputEvent]:
        """Returns text that was held back; a head without a body is content."""
        self._scan.ended = True
        self._run()
        if self._state == self._in_head:
            self._emit(Content, self._scan.unmark())
        return self._taken()

    def _run(self) -> None:
        while (not self._scan.empty or self._scan.ended) and self._state():
            pass

    def _taken(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    def _emit(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Emits text; a further message of the same kind begins on a new line."""
        if not text:
            return
        if self._fresh and kind in self._said:
            text = "\n" + text
        self._fresh = False
        self._said.add(kind)
        self._events.append(kind(text))

    def _outside(self) -> bool:
        """Reads text between messages, which is content; drops white space."""
        if self._said and not self._loose and not self._scan.skip_space():
            return False
        text, marker = self._scan.until(_HEADS)
        self._loose = self._loose or bool(text)
        self._emit(Content, text)
        if marker is None:
            return False
        self._scan.at -= len(marker)
        self._begin_head()
        return True

    def _begin_head(self) -> None:
        self._scan.mark()
        self._head = ""
        self._loose = False
        self._state = self._in_head

    def _in_head(self) -> bool:
        text, marker = self._scan.until(_BODY, _MAX_HEAD + 1 - len(self._head))
        self._head += text
        if len(self._head) > _MAX_HEAD:
            self._emit(Content, self._scan.unmark())
            self._loose, self._state = True, self._outside
            return True
        if marker is None:
            return False
        channel = _CHANNEL.search(self._head)
        recipient = _RECIPIENT.search(self._head)
        self._kind = Reasoning if channel is not None and channel.group(1) == "analysis" else Content
        self._fresh = True
        self._scan.unmark()
        name = recipient.group(1).removeprefix("functions.") if recipient is not None else ""
        if self._calls and name and NAME.fullmatch(name) and recipient is not None and _is_function(recipient.group(1)):
            self._events.append(CallBegin(self._num_calls, name))
            self._num_calls += 1
            self._span = None
            self._state = self._before_arguments
        else:
            self._state = self._in_body
        return True

    def _in_body(self) -> bool:
        text, marker = self._scan.until(_ENDS)
        self._emit(self._kind, text)
        return self._after(marker)

    def _after(self, marker: str | None) -> bool:
        """Chooses the state after a marker that ends a message and may begin another."""
        if marker is None:
            return False
        if marker in ("<|start|>", "<|channel|>"):
            self._scan.at -= len(marker)
            self._begin_head()
        else:
            self._state = self._outside
        return True

    def _before_arguments(self) -> bool:
        if not self._scan.skip_space():
            return False
        marker = self._scan.over(_ENDS)
        if marker is None:
            return False
        if marker:
            self._arguments("{}")
            self._events.append(CallEnd(self._num_calls - 1))
            return self._after(marker)
        if self._scan.text[self._scan.at] == "{":
            self._span, self._state = JsonSpan(_STOPS), self._in_arguments
        else:
            self._state = self._in_text_arguments
        return True

    def _in_arguments(self) -> bool:
        if self._span is None:
            return False
        text, done = self._span.take(self._scan)
        self._arguments(text)
        if done:
            self._events.append(CallEnd(self._num_calls - 1))
            self._state = self._after_arguments
        return done

    def _in_text_arguments(self) -> bool:
        """Passes on a message that is not a JSON object as the arguments, unchanged."""
        text, marker = self._scan.until(_ENDS)
        if text:
            self._arguments(text)
        if marker is not None:
            self._events.append(CallEnd(self._num_calls - 1))
        return self._after(marker)

    def _after_arguments(self) -> bool:
        """Reads text after the arguments in the same message, which is content."""
        if not self._scan.skip_space():
            return False
        self._kind, self._fresh, self._state = Content, True, self._in_body
        return True

    def _arguments(self, text: str) -> None:
        self._events.append(CallArguments(self._num_calls - 1, text))


def _is_function(recipient: str) -> bool:
    return recipient.startswith("functions.")


class HarmonyParser(ToolParser):
    """gpt-oss: reasoning, content and calls together."""

    special_tokens = SPECIAL_TOKENS
    reads_reasoning = True

    def end(self, request: ParserRequest) -> str:
        """The head of the message that is the answer; calls are messages before it."""
        del request
        return FINAL

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of messages, in which calls count when tools were offered."""
        return HarmonyReader(calls=bool(request.tools))


class HarmonyReasoningParser(ReasoningParser):
    """gpt-oss without calls: the channel `analysis` is reasoning."""

    special_tokens = SPECIAL_TOKENS

    def end(self, request: ParserRequest) -> str:
        """The head of the message that is the answer."""
        del request
        return FINAL

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of messages."""
        del request
        return HarmonyReader(calls=False)
