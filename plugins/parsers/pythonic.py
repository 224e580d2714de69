"""Tool calls written as Python calls with keyword arguments: `[get_weather(city="Paris"), get_time()]`.

Values are read as literals (see `literals`); nothing is evaluated. An argument that is not a literal is passed on as
it was written, and the arguments then are not JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from frame.interfaces import OutputReader, ParserRequest, ToolParser

from .calls import MAX_NAME, CallReader
from .literals import LiteralError, read_literal, to_json
from .scan import Markers, Scan

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_OUTSIDE = re.compile(r"""['"()\[\]{},]""")
_QUOTED = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}


class LiteralSpan:
    """Finds where a value of a keyword argument ends: at a comma or parenthesis that is in no bracket and no text."""

    def __init__(self, stops: str = ",)") -> None:
        self._stops = stops
        self._depth = 0
        self._quote = ""

    def take(self, scan: Scan) -> tuple[str, bool]:
        """Reads the part of the value that has arrived; True when it is complete and the next character ends it."""
        text, at = scan.text, scan.at
        while at < len(text):
            pattern = _QUOTED[self._quote[0]] if self._quote else _OUTSIDE
            match = pattern.search(text, at)
            if match is None:
                at = len(text)
                break
            at = match.start()
            width = self._width(text, at, scan.ended)
            if width is None:
                break
            if not self._quote and self._closes(text[at]):
                return scan.take(at), True
            self._step(text, at, width)
            at += width
        return scan.take(min(at, len(text))), False

    def _width(self, text: str, at: int, ended: bool) -> int | None:
        """The number of characters from `at` that are read as one; None when more text is needed to tell."""
        character = text[at]
        if character == "\\":
            return 2 if ended or at + 1 < len(text) else None
        if character not in "'\"":
            return 1
        run = text[at : at + 3]
        if run == character * 3:
            return 3 if len(self._quote) != 1 else 1
        if not ended and len(self._quote) != 1 and run == character * len(run) and at + len(run) == len(text):
            return None
        return 1

    def _closes(self, character: str) -> bool:
        return self._depth == 0 and character in self._stops

    def _step(self, text: str, at: int, width: int) -> None:
        character = text[at]
        if character == "\\":
            return
        if self._quote:
            if text[at : at + width] == self._quote:
                self._quote = ""
        elif character in "'\"":
            self._quote = character * width
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth = max(0, self._depth - 1)


class PythonicReader(CallReader):
    """Reads a list of calls: at the start of the output, and between `begin` and `end` where those are given.

    Without markers only offered functions count as calls; other lists are an answer. `lines`: each call is on a line
    of its own, and the brackets may be missing.
    """

    def __init__(
        self, request: ParserRequest, begin: Sequence[str] = (), end: Sequence[str] = (), lines: bool = False
    ) -> None:
        super().__init__(request)
        self._begin = Markers(begin)
        self._closers = Markers(end)
        self._lines = lines
        self._marked = self._in_list = False
        self._name = ""
        self._key: list[str] = []
        self._num_arguments = 0
        self._texts: list[str] = []
        self._span = LiteralSpan()
        if not lines:
            self.state = self._first

    def outside(self) -> bool:
        """Reads content up to a marker."""
        if self.marked_after_content(self._begin) is None:
            return False
        self._marked, self.state = True, self._before_list
        return True

    def _first(self) -> bool:
        """Reads the beginning of an output, which may be a list of calls without a marker."""
        self.scan.mark()
        self.state = self._before_list
        return True

    def _before_list(self) -> bool:
        if not self.scan.skip_space():
            return False
        self._in_list = self.scan.text[self.scan.at] == "["
        if self._in_list:
            self.scan.at += 1
        elif not self._lines:
            self._leave()
            return True
        self._name, self.state = "", self._in_name
        return True

    def _in_name(self) -> bool:
        """Reads a name and the parenthesis after it."""
        if not self._name and not self.scan.skip_space():
            return False
        match = _NAME.match(self.scan.text, self.scan.at)
        self._name += self.scan.take(self.scan.at if match is None else match.end())
        if self.scan.empty and len(self._name) <= MAX_NAME:
            return False
        known = self._marked or self.request.tool(self._name) is not None
        if self.scan.empty or self.scan.text[self.scan.at] != "(" or not (self.is_name(self._name) and known):
            self._leave()
            return True
        self.scan.at += 1
        self.begin(self._name)
        self._num_arguments = 0
        self.state = self._before_argument
        return True

    def _before_argument(self) -> bool:
        if not self.scan.skip_space():
            return False
        character = self.scan.text[self.scan.at]
        if character == ")":
            self.scan.at += 1
            self.arguments("}" if self._num_arguments else "{}")
            self.end()
            self.state = self._after_call_text
        elif character == "," and self._num_arguments:
            self.scan.at += 1
        else:
            self._key, self.state = [], self._in_key
        return True

    def _in_key(self) -> bool:
        match = _NAME.match(self.scan.text, self.scan.at)
        self._key.append(self.scan.take(self.scan.at if match is None else match.end()))
        if self.scan.empty and not self.scan.ended:
            return False
        self.state = self._after_key
        return True

    def _after_key(self) -> bool:
        if not self.scan.skip_space():
            return False
        key = "".join(self._key)
        if self.scan.text[self.scan.at] != "=" or not key:
            self.arguments(key)  # not a keyword argument, so the arguments cannot become JSON
            self._span, self.state = LiteralSpan(")"), self._broken
            return True
        self.scan.at += 1
        self.arguments(f"{', ' if self._num_arguments else '{'}{to_json(key)}: ")
        self._num_arguments += 1
        self._texts, self._span, self.state = [], LiteralSpan(), self._in_value
        return True

    def _in_value(self) -> bool:
        text, done = self._span.take(self.scan)
        self._texts.append(text)
        if done:
            written = "".join(self._texts)
            try:
                self.arguments(to_json(read_literal(written.strip())))
            except LiteralError:
                self.arguments(written)
            self.state = self._before_argument
        return done

    def _broken(self) -> bool:
        text, done = self._span.take(self.scan)
        self.arguments(text)
        if done:
            self.scan.at += 1
            self.end()
            self.state = self._after_call_text
        return done

    def _after_call_text(self) -> bool:
        """After a call: reads another call, the end of the list, a closing marker, or content."""
        if not self.scan.skip_space():
            return False
        character = self.scan.text[self.scan.at]
        if self._in_list and character in ",]":
            self.scan.mark()
            self.scan.at += 1
            if character == ",":
                self._name, self.state = "", self._in_name
            else:
                self.scan.unmark()
                self._in_list = False
            return True
        closer = self.scan.over(self._closers)
        if closer is None:
            return False
        if not closer and self._lines and not self._in_list and (character.isalpha() or character == "_"):
            self.scan.mark()
            self._name, self.state = "", self._in_name
        else:
            self._leave()
        return True

    def _leave(self) -> None:
        self.degrade()
        self._in_list = self._marked = False
        self.state = self.outside


class PythonicParser(ToolParser):
    """`[name(key=value), …]` as the whole output: Llama 3.2, ToolACE."""

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of a bare list."""
        return PythonicReader(request)


class Llama4PythonicParser(ToolParser):
    """As pythonic, also between `<|python_start|>` and `<|python_end|>`: Llama 4."""

    special_tokens = ("<|python_start|>", "<|python_end|>")

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of a list with or without tags."""
        return PythonicReader(request, ("<|python_start|>",), ("<|python_end|>",))


class Olmo3Parser(ToolParser):
    """Calls in lines between `<function_calls>` and `</function_calls>`: OLMo 3."""

    special_tokens = ("<function_calls>", "</function_calls>")

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of tagged lines."""
        return PythonicReader(request, ("<function_calls>",), ("</function_calls>",), lines=True)


class Lfm2Parser(ToolParser):
    """As pythonic, also between `<|tool_call_start|>` and `<|tool_call_end|>`: LFM2."""

    special_tokens = ("<|tool_call_start|>", "<|tool_call_end|>")

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of a list with or without tags."""
        return PythonicReader(request, ("<|tool_call_start|>",), ("<|tool_call_end|>",))
