"""Tool calls that write each argument between tags of its own. Knows no model's tags.

Arguments are converted to JSON as they arrive: a value that the tool's schema calls text is streamed, any other is read
as JSON or as a Python literal once it is complete. A value that cannot be read stays text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from frame.interfaces import ParserRequest, Tool

from .calls import MAX_NAME, CallReader
from .literals import LiteralError, read_json, read_literal, to_json
from .scan import Markers, follows

#: What a key must look like to end a value whose own end is missing.
_MAX_KEY = 64
_KEY = rf"[\w.\-]{{1,{_MAX_KEY}}}"
_TEXT = frozenset(("string",))
_NOT_TEXT = frozenset(("integer", "number", "boolean", "null", "object", "array"))


@dataclass(frozen=True)
class TaggedFormat:
    """`begin NAME name_end (key_begin KEY key_end [value_begin] VALUE value_end)* end [closer]`.

    `opener` stands before the first call. `name_end` may be missing: the name also ends where a key or `end` begins.
    `typed_key_ends` are further ends of a key that say whether the value is text. `padding`: one line break on each
    side of a value belongs to the format.
    """

    begin: Sequence[str]
    end: str
    key_begin: str
    key_end: str
    value_end: str
    name_end: str = ""
    value_begin: str = ""
    opener: Sequence[str] = ()
    closers: Sequence[str] = ()
    typed_key_ends: Sequence[tuple[str, bool]] = ()
    padding: bool = False


class TaggedCallReader(CallReader):
    """Reads calls of a `TaggedFormat`."""

    def __init__(self, request: ParserRequest, form: TaggedFormat) -> None:
        super().__init__(request)
        self._form = form
        self._outside = Markers((*form.begin, *form.opener))
        self._begin = Markers(form.begin)
        self._after_name = Markers((form.name_end, form.key_begin, form.end))
        self._inside = Markers((form.key_begin, form.end, *form.closers))
        self._key_ends = Markers((form.key_end, *(text for text, _ in form.typed_key_ends)))
        self._value_begin = Markers((form.value_begin,))
        self._value_end = Markers((form.value_end, form.key_begin, form.end, *form.closers))
        self._call_end = Markers((form.end, *form.closers, *form.opener, *form.begin))
        self._next_key = re.compile(
            rf"{re.escape(form.key_begin)}{_KEY}(?:{'|'.join(map(re.escape, self._key_ends.texts))})"
        )
        self._longest_key = len(form.key_begin) + _MAX_KEY + max(map(len, self._key_ends.texts))
        self._between = Markers((*form.begin, *form.opener, *form.closers))
        self._head = ""
        self._key: list[str] = []
        self._value: _Value | None = None
        self._tool: Tool | None = None
        self._num_arguments = 0
        self._kinds_of: dict[tuple[str, str], frozenset[str]] = {}

    def outside(self) -> bool:
        """Reads content up to a marker."""
        text, marker = self.scan.until(self._outside)
        self.content(text)
        if marker is None:
            return False
        self.scan.at -= len(marker)
        self._open(marker)
        return True

    def _open(self, marker: str) -> None:
        """Reads a marker that may begin a call."""
        self.scan.mark()
        self.scan.at += len(marker)
        self._head = ""
        self.state = self._in_name if marker in self._form.begin else self._after_opener

    def _after_opener(self) -> bool:
        if not self.scan.skip_space():
            return False
        marker = self.scan.over(self._begin)
        if marker is None:
            return False
        if marker:
            self._head = ""
            self.state = self._in_name
        else:
            self._leave()
        return True

    def _in_name(self) -> bool:
        text, marker = self.scan.until(self._after_name, MAX_NAME + 1 - len(self._head))
        self._head += text
        if len(self._head) > MAX_NAME:
            self._leave()
            return True
        if marker is None:
            return False
        name = self._head.strip()
        if not self.is_name(name):
            self._leave()
            return True
        self.begin(name)
        self._tool, self._num_arguments = self.request.tool(name), 0
        self.scan.at -= 0 if marker == self._form.name_end else len(marker)
        self.state = self._before_key
        return True

    def _before_key(self) -> bool:
        """Reads the next argument or the end of the call; anything else is passed on unchanged as arguments."""
        if not self.scan.skip_space():
            return False
        marker = self.scan.over(self._inside)
        if marker is None:
            return False
        if marker == self._form.key_begin:
            self._key = []
            self.state = self._in_key
        elif marker:
            self.scan.at -= 0 if marker == self._form.end else len(marker)
            self.arguments("}" if self._num_arguments else "{}")
            self._finish_call()
        else:
            self.state = self._broken
        return True

    def _in_key(self) -> bool:
        text, marker = self.scan.until(self._key_ends)
        self._key.append(text)
        if marker is None:
            return False
        key = "".join(self._key).strip()
        self.arguments(f"{', ' if self._num_arguments else '{'}{to_json(key)}: ")
        self._num_arguments += 1
        typed = dict(self._form.typed_key_ends).get(marker)
        self._value = _Value(self._kinds(key, typed), self._form.padding)
        self.state = self._before_value if self._form.value_begin else self._in_value
        return True

    def _before_value(self) -> bool:
        if not self.scan.skip_space():
            return False
        marker = self.scan.over(self._value_begin)
        if marker is None:
            return False
        self.state = self._in_value if marker else self._broken
        return True

    def _in_value(self) -> bool:
        text, marker = self.scan.until(self._value_end)
        if self._value is None:
            return False
        ends = None if marker is None else self._ends_value(marker)
        if marker is None or ends is None:
            self.scan.at -= len(marker or "")
            self.arguments(self._value.feed(text, False))
            return False
        if not ends:
            text += marker
        elif marker != self._form.value_end:
            self.scan.at -= len(marker)
        self.arguments(self._value.feed(text, ends))
        if ends:
            self.state = self._before_key
        return True

    def _ends_value(self, marker: str) -> bool | None:
        """Whether a marker that was read ends the value, whose own end may be missing; None: more text is needed.

        A value may mention the other markers. So a key must be complete to end it, and in formats with closing markers
        the end of the call must be followed by a marker or by the end of the output.
        """
        form, scan = self._form, self.scan
        if marker == form.value_end or (marker == form.end and not form.closers):
            return True
        if marker != form.key_begin:
            return follows(scan, scan.at, self._between)
        start = scan.at - len(marker)
        if self._next_key.match(scan.text, start):
            return True
        return False if scan.ended or len(scan.text) - start >= self._longest_key else None

    def _broken(self) -> bool:
        """Passes on text that is not an argument, up to the end of the call or the beginning of another."""
        text, marker = self.scan.until(self._call_end)
        self.arguments(text)
        if marker is None:
            return False
        if marker != self._form.end:
            self.scan.at -= len(marker)
        self._finish_call()
        return True

    def _finish_call(self) -> None:
        self.end()
        self.state = self._after_call_text

    def _after_call_text(self) -> bool:
        """After a call: reads closing markers, another call, or content."""
        if not self.scan.skip_space():
            return False
        marker = self.scan.over(self._between)
        if marker is None:
            return False
        if not marker:
            self.state = self.outside
        elif marker not in self._form.closers:
            self.scan.at -= len(marker)
            self._open(marker)
        return True

    def _kinds(self, key: str, is_text: bool | None) -> frozenset[str]:
        """The JSON types that a value may have; empty when neither tag nor schema says."""
        if is_text is not None:
            return _TEXT if is_text else _NOT_TEXT
        if self._tool is None:
            return frozenset()
        place = (self._tool.name, key)
        if place not in self._kinds_of:  # cached: a schema may be long, and each piece of a value asks
            self._kinds_of[place] = self._tool.types_of(key)
        return self._kinds_of[place]

    def _leave(self) -> None:
        self.degrade()
        self.state = self.outside


class _Value:
    """Converts one value to JSON."""

    def __init__(self, kinds: frozenset[str], padding: bool) -> None:
        self._kinds = kinds
        self._padding = padding
        self._streams = kinds == _TEXT
        self._texts: list[str] = []
        self._begun = False
        self._held = ""

    def feed(self, text: str, ended: bool) -> str:
        """The JSON text that a further piece adds."""
        if self._streams:
            return self._stream(text, ended)
        self._texts.append(text)
        return self._converted("".join(self._texts)) if ended else ""

    def _stream(self, text: str, ended: bool) -> str:
        text = self._held + text
        self._held = ""
        opening = ""
        if not self._begun:
            if not text and not ended:
                return ""
            self._begun, opening = True, '"'
            text = text.removeprefix("\n") if self._padding else text
        if self._padding:
            if ended:
                text = text.removesuffix("\n")
            elif text.endswith("\n"):
                text, self._held = text[:-1], "\n"
        return opening + to_json(text)[1:-1] + ('"' if ended else "")

    def _converted(self, text: str) -> str:
        if self._padding:
            text = text.removeprefix("\n").removesuffix("\n")
        bare = text.strip()
        for read in (read_json, read_literal):
            try:
                value = read(bare)
                if self._fits(value):
                    return to_json(value)
            except (LiteralError, RecursionError):
                continue
        if "boolean" in self._kinds and bare.lower() in ("true", "false"):
            return bare.lower()
        return to_json(text)

    def _fits(self, value: object) -> bool:
        """Whether a converted value has a type that the schema allows; without a schema, any type but text."""
        kind = _TYPES[type(value)]
        if not self._kinds:
            return kind != "string"
        return kind in self._kinds or (kind == "integer" and "number" in self._kinds)


_TYPES = {
    bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object", list: "array",
}  # fmt: skip
