"""Tool calls that write each argument between tags of its own. Knows no model's tags.

Arguments are converted to JSON as they arrive (see `values`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from frame.interfaces import ParserRequest, Tool

from .calls import MAX_NAME, CallReader
from .literals import to_json
from .scan import Markers, follows
from .values import NOT_TEXT, TEXT, Kinds, Value

#: What a key must look like to end a value whose own end is missing.
_MAX_KEY = 64
_KEY = rf"[\w.\-]{{1,{_MAX_KEY}}}"
#: Stands for the key in the end of a value.
KEY = "\0"


@dataclass(frozen=True)
class TaggedFormat:
    """`begin NAME name_end (key_begin KEY key_end [value_begin] VALUE value_end)* end [closer]`.

    `opener` stands before the first call. `name_end` may be missing: the name also ends where a key or `end` begins.
    `typed_key_ends` are further ends of a key that say whether the value is text. `value_end` may repeat the key, in
    place of `KEY`. `padding`: one line break on each side of a value belongs to the format. `line` is what models write
    between the parts, and `attributes` what they write between the name and its end.
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
    line: str = "\n"
    attributes: str = ""

    def end_of(self, key: str) -> str:
        """The end of the value of an argument."""
        return self.value_end.replace(KEY, key)

    def key_end_of(self, kinds: frozenset[str], is_text: bool) -> str:
        """The end of a key whose value has one of these JSON types."""
        fitting = [end for end, text in self.typed_key_ends if text == is_text]
        named = [end for end in fitting if any(f'"{kind}"' in end for kind in kinds)]
        return (named or fitting or [self.key_end])[0]


class TaggedCallReader(CallReader):
    """Reads calls of a `TaggedFormat`."""

    def __init__(self, request: ParserRequest, form: TaggedFormat) -> None:
        super().__init__(request)
        self.form = form
        self._outside = Markers((*form.begin, *form.opener))
        self._begin = Markers(form.begin)
        self._after_name = Markers((form.name_end, form.key_begin, form.end))
        self._inside = Markers((form.key_begin, form.end, *form.closers))
        self._key_ends = Markers((form.key_end, *(text for text, _ in form.typed_key_ends)))
        self._value_begin = Markers((form.value_begin,))
        self.close = form.value_end
        self._value_end = Markers((self.close, form.key_begin, form.end, *form.closers))
        self._call_end = Markers((form.end, *form.closers, *form.opener, *form.begin))
        self._next_key = re.compile(
            rf"{re.escape(form.key_begin)}{_KEY}(?:{'|'.join(map(re.escape, self._key_ends.texts))})"
        )
        self._longest_key = len(form.key_begin) + _MAX_KEY + max(map(len, self._key_ends.texts))
        self._between = Markers((*form.begin, *form.opener, *form.closers))
        self._head = ""
        self._key: list[str] = []
        self._value = Value(TEXT, False)
        self.tool: Tool | None = None
        self.kinds = Kinds(self.tool)
        self._num_arguments = 0

    def outside(self) -> bool:
        """Reads content up to a marker."""
        marker = self.marked_after_content(self._outside)
        if marker is None:
            return False
        self._open(marker)
        return True

    def _open(self, marker: str) -> None:
        """Reads on behind a marker that may begin a call, which is marked."""
        self._head = ""
        self.state = self._in_name if marker in self.form.begin else self._after_opener

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
            self.leave()
        return True

    def _in_name(self) -> bool:
        text, marker = self.scan.until(self._after_name, MAX_NAME + 1 - len(self._head))
        self._head += text
        if len(self._head) > MAX_NAME:
            self.leave()
            return True
        if marker is None:
            return False
        name = self.name_of(self._head)
        if not self.is_name(name):
            self.leave()
            return True
        self.begin(name)
        self.tool, self._num_arguments = self.request.tool(name), 0
        self.kinds = Kinds(self.tool)
        self.scan.at -= 0 if marker == self.form.name_end else len(marker)
        self.state = self._before_key
        return True

    def _before_key(self) -> bool:
        """Reads the next argument or the end of the call; anything else is passed on unchanged as arguments."""
        if not self.scan.skip_space():
            return False
        marker = self.scan.over(self._inside)
        if marker is None:
            return False
        if marker == self.form.key_begin:
            self._key = []
            self.state = self._in_key
        elif marker:
            self.scan.at -= 0 if marker == self.form.end else len(marker)
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
        key = self.key_of("".join(self._key))
        self.arguments(f"{', ' if self._num_arguments else '{'}{to_json(key)}: ")
        self._num_arguments += 1
        is_text = dict(self.form.typed_key_ends).get(marker)
        self._value = self.value_of(key, is_text)
        if KEY in self.form.value_end:
            self.close = self.form.end_of(key)
            self._value_end = Markers((self.close, *self.marks_in(key), self.form.end, *self.form.closers))
        self.state = self._before_value if self.form.value_begin else self._in_value
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
        ends = None if marker is None else self.ends_value(marker)
        if marker is None or ends is None:
            self.scan.at -= len(marker or "")
            self.arguments(self._value.feed(text, False))
            return False
        if not ends:
            text += marker
        elif marker != self.close:
            self.scan.at -= len(marker)
        self.arguments(self._value.feed(text, ends))
        if ends:
            self.state = self._before_key
        return True

    def ends_value(self, marker: str) -> bool | None:
        """Whether a marker that was read ends the value, whose own end may be missing; None: more text is needed.

        A value may mention the other markers. So a key must be complete to end it, and in formats with closing markers
        the end of the call must be followed by a marker or by the end of the output.
        """
        form, scan = self.form, self.scan
        if marker == self.close or (marker == form.end and not form.closers):
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
        if marker != self.form.end:
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
        elif marker not in self.form.closers:
            self.mark_again(marker)
            self._open(marker)
        return True

    def name_of(self, head: str) -> str:
        """The name in the text between `begin` and `name_end`."""
        return head.strip()

    def key_of(self, text: str) -> str:
        """The key in the text between `key_begin` and `key_end`."""
        return text.strip()

    def marks_in(self, key: str) -> Sequence[str]:
        """The markers in a value that may end it or be a part of it, where the end of a value repeats its key."""
        del key
        return (self.form.key_begin,)

    def value_of(self, key: str, is_text: bool | None) -> Value:
        """What converts the value of an argument; `is_text` is None where the end of its key does not say."""
        kinds = self.kinds.of(key) if is_text is None else TEXT if is_text else NOT_TEXT
        return Value(kinds, self.form.padding)
