"""Tool calls whose arguments stand in braces, with bare keys and texts between marks: `NAME{city:"Paris",days:3}`.

Knows no model's markers. Arguments are converted to JSON as they arrive (see `values`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frame.interfaces import ParserRequest

from .braced_values import BracedSpan, BracedValue
from .calls import MAX_NAME, CallReader
from .literals import to_json
from .scan import Markers, follows
from .values import TEXT, Kinds, Value

_MAX_KEY = 256


@dataclass(frozen=True)
class BracedFormat:
    """`begin NAME {KEY:VALUE,…} end`, where `quote` stands on both sides of a text."""

    begin: Sequence[str]
    end: str
    quote: str


class BracedCallReader(CallReader):
    """Reads calls of a `BracedFormat`."""

    def __init__(self, request: ParserRequest, form: BracedFormat) -> None:
        super().__init__(request)
        self._form = form
        self._begin = Markers(form.begin)
        self._between = Markers((*form.begin, form.end))
        self._after_name = Markers(("{", form.end, *form.begin))
        self._after_key = Markers((":", "}", ",", *self._between.texts))
        self._quote = Markers((form.quote,))
        self._text_end = Markers((form.quote, form.end))
        self._bare_end = Markers((",", "}", *self._between.texts))
        self._head: list[str] = []
        self._length = 0
        self._value = Value(TEXT, False)
        self._span = BracedSpan(form.quote, form.end, self._between)
        self._kinds = Kinds(None)
        self._num_arguments = 0

    def outside(self) -> bool:
        """Reads content up to a marker."""
        marker = self.marked_after_content(self._begin)
        if marker is None:
            return False
        self._open(marker)
        return True

    def _open(self, marker: str) -> None:
        """Reads on behind a marker that may begin a call, which is marked."""
        self._head, self._length, self.state = [], 0, self._in_name

    def _in_name(self) -> bool:
        text, marker = self.scan.until(self._after_name, MAX_NAME + 1 - self._length)
        self._head.append(text)
        self._length += len(text)
        name = "".join(self._head).strip()
        if self._length > MAX_NAME or (marker is not None and (not self.is_name(name) or marker in self._form.begin)):
            self.scan.at -= len(marker or "")
            self.leave()
            return True
        if marker is None:
            return False
        self.begin(name)
        self._kinds, self._num_arguments = Kinds(self.request.tool(name)), 0
        self.scan.at -= 0 if marker == "{" else len(marker)
        self.state = self._before_key
        return True

    def _before_key(self) -> bool:
        """Reads the next argument or the end of the arguments."""
        if not self.scan.skip_space():
            return False
        marker = self.scan.over(self._bare_end)
        if marker is None:
            return False
        if marker == ",":
            return True
        if marker:
            self.scan.at -= 0 if marker == "}" else len(marker)
            self.arguments("}" if self._num_arguments else "{}")
            self._finish_call()
        else:
            self._head, self._length, self.state = [], 0, self._in_key
        return True

    def _in_key(self) -> bool:
        text, marker = self.scan.until(self._after_key, _MAX_KEY + 1 - self._length)
        self._head.append(text)
        self._length += len(text)
        if marker is None and self._length <= _MAX_KEY:
            return False
        if marker != ":":
            self.arguments("".join(self._head))  # not an argument, so the arguments cannot become JSON
            self.scan.at -= len(marker or "")
            self.state = self._broken
            return True
        key = "".join(self._head).strip().removeprefix(self._form.quote).removesuffix(self._form.quote).strip('"')
        self.arguments(f"{', ' if self._num_arguments else '{'}{to_json(key)}: ")
        self._num_arguments += 1
        self._value = BracedValue(self._kinds.of(key), self._form.quote)
        self.state = self._before_value
        return True

    def _before_value(self) -> bool:
        if not self.scan.skip_space():
            return False
        quote = self.scan.over(self._quote)
        if quote is None:
            return False
        if quote:
            if not self._value.kinds or "string" in self._value.kinds:
                self._value = Value(TEXT, False)
            self.state = self._in_text
        elif (first := self.scan.text[self.scan.at]) in '{["':
            if first == '"' and (not self._value.kinds or "string" in self._value.kinds):
                self._value = BracedValue(TEXT | {"null"}, self._form.quote)  # not streamed, because of escapes
            self._span = BracedSpan(self._form.quote, self._form.end, self._between)
            self.state = self._in_nested
        else:
            self.state = self._in_bare
        return True

    def _in_text(self) -> bool:
        text, marker = self.scan.until(self._text_end)
        ends = None if marker is None else marker == self._form.quote or self._ends_call()
        if marker is None or ends is None:
            self.scan.at -= len(marker or "")
            self.arguments(self._value.feed(text, False))
            return False
        if marker != self._form.quote and ends:
            self.scan.at -= len(marker)
        self.arguments(self._value.feed(text if ends else text + marker, ends))
        if ends:
            self.state = self._before_key
        return True

    def _ends_call(self) -> bool | None:
        """Whether the end of a call that was read ends a text too, whose own end is missing; a text may mention it."""
        return follows(self.scan, self.scan.at, self._between)

    def _in_nested(self) -> bool:
        text, done = self._span.take(self.scan)
        self.arguments(self._value.feed(text, done))
        if done:
            self.state = self._before_key
        return done

    def _in_bare(self) -> bool:
        text, marker = self.scan.until(self._bare_end)
        self.arguments(self._value.feed(text, marker is not None))
        if marker is None:
            return False
        self.scan.at -= len(marker)
        self.state = self._before_key
        return True

    def _broken(self) -> bool:
        """Passes on text that is not an argument, up to the end of the call or the beginning of another."""
        text, marker = self.scan.until(self._between)
        self.arguments(text)
        if marker is None:
            return False
        self.scan.at -= len(marker)
        self._finish_call()
        return True

    def _finish_call(self) -> None:
        self.end()
        self.state = self._after_call_text

    def _after_call_text(self) -> bool:
        """After a call: reads its end, another call, or content."""
        if not self.scan.skip_space():
            return False
        marker = self.scan.over(self._between)
        if marker is None:
            return False
        if not marker:
            self.state = self.outside
        elif marker != self._form.end:
            self.mark_again(marker)
            self._open(marker)
        return True
