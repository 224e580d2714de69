"""The base of readers of tool calls: content around calls, numbering, and text that turns out to be no call.

A reader is a state machine; each state reads what it can and sets the next one. White space next to a call is dropped,
other text stays content. Knows no format.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence

from frame.interfaces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    OutputEvent,
    OutputReader,
    ParserRequest,
)

from .scan import Markers, Scan

#: What may be a function's name; without a bound, ordinary text could pass for the head of a call.
NAME = re.compile(r"[A-Za-z0-9_.\-:/]{1,256}")
MAX_NAME = 256

State = Callable[[], bool]


class CallReader(OutputReader):
    """A reader of calls. `state` reads and returns whether it should be called again without further text."""

    def __init__(self, request: ParserRequest) -> None:
        self.request = request
        self.scan = Scan()
        self.num_calls = 0
        self.state: State = self.outside
        self._events: list[OutputEvent] = []
        self._space: list[str] = []
        self._said = self._after_call = False

    @abstractmethod
    def outside(self) -> bool:
        """Reads content up to a place where a call may begin; the first state of a reader."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        """Takes new text."""
        del token_ids
        if text:
            self.scan.feed(text)
            self._run()
        return self._taken()

    def finish(self) -> list[OutputEvent]:
        """Ends the output: returns the events of the text that was held back."""
        self.scan.ended = True
        self._run()
        self.degrade()
        self.content(self.scan.take(len(self.scan.text)))
        if not self.num_calls:
            self._events.append(Content("".join(self._space)))
        return self._taken()

    def _run(self) -> None:
        while (not self.scan.empty or self.scan.ended) and self.state():
            pass

    def _taken(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        """Adds content; white space at its end is held back until more content follows."""
        if self._after_call:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            before = "".join(self._space)
            self._events.append(Content(before + body if self._said or not self._after_call else body))
            self._said, self._after_call = True, False
            self._space = [text[len(body) :]]
        elif text:
            self._space.append(text)

    def begin(self, name: str, call_id: str = "") -> None:
        """Begins a call, whose head was the marked text."""
        self.scan.unmark()
        self._after_call = True
        self._events.append(CallBegin(self.num_calls, name, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the newest call."""
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """Ends the newest call."""
        self._events.append(CallEnd(self.num_calls - 1))

    def marked_after_content(self, markers: Markers) -> str | None:
        """Reads content up to one of `markers`, from which on the text is content again if no call follows.

        The marker is behind it then; None where more text is needed.
        """
        text, marker = self.scan.until(markers)
        self.content(text)
        if marker is not None:
            self.mark_again(marker)
        return marker

    def mark_again(self, marker: str) -> None:
        """Marks the text from `marker` on, which was just read."""
        self.scan.at -= len(marker)
        self.scan.mark()
        self.scan.at += len(marker)

    def degrade(self) -> None:
        """Turns marked text that is not a call into content."""
        self.content(self.scan.unmark())

    def leave(self) -> None:
        """Reads content again, because what was marked is no call."""
        self.degrade()
        self.state = self.outside

    def is_name(self, name: str) -> bool:
        """Whether a call may have this name."""
        return NAME.fullmatch(name) is not None
