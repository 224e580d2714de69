"""Objects and lists with bare keys and texts between marks, as JSON: `{at:[1,{name:"x"}]}`. Knows no model's marks."""

from __future__ import annotations

from .literals import LiteralError, to_json
from .scan import Markers, Scan, follows
from .values import Value

_MARKS = Markers('"{},:[]')


class BracedSpan:
    """Finds the end of one value in brackets or in quotes of JSON; a text between `quote` marks may hold brackets.

    An `end` outside of texts ends the value too, and stays unread. One inside a text does where one of `between` or the
    end of the output follows.
    """

    def __init__(self, quote: str, end: str, between: Markers) -> None:
        self._quote = quote
        self._end = end
        self._between = between
        self._outside = Markers((quote, end, *'"{}[]'))
        self._inside = Markers((quote, end))
        self._in_json = Markers(('"', '\\"', "\\\\", end))
        self._depth = 0
        self._in_text = ""

    def take(self, scan: Scan) -> tuple[str, bool]:
        """Reads the part of the value that has arrived; True when it is complete."""
        taken = []
        while True:
            markers = {"": self._outside, '"': self._in_json}.get(self._in_text, self._inside)
            text, marker = scan.until(markers)
            taken.append(text)
            if marker is None:
                return "".join(taken), False
            if marker == self._end:
                ends = not self._in_text or follows(scan, scan.at, self._between)
                if ends is not False:
                    scan.at -= len(marker)
                    return "".join(taken), ends is True
            taken.append(marker)
            if self._step(marker):
                return "".join(taken), True

    def _step(self, marker: str) -> bool:
        """Follows brackets and texts; returns whether the value ends here."""
        if marker in (self._quote, '"'):
            self._in_text = "" if self._in_text else marker
        elif not self._in_text:
            self._depth += (marker in "{[") - (marker in "}]")
        return self._depth <= 0 and not self._in_text


class BracedValue(Value):
    """A value that is no text between marks: a scalar, or an object or list in brackets."""

    def __init__(self, kinds: frozenset[str], quote: str) -> None:
        super().__init__(kinds, False)
        self._quote = quote

    def converted(self, text: str) -> str:
        """The value as JSON."""
        text = text.strip()
        written = _as_json(text, self._quote) if text.startswith(("{", "[")) else text
        found = super().converted(written)
        return to_json(text) if found == to_json(written) else found


def _as_json(text: str, quote: str) -> str:
    """The text with keys and texts in quotes of JSON; unchanged where a text does not end."""
    pieces = text.split(quote)
    if len(pieces) % 2 == 0:
        return text
    written = [to_json(one) if at % 2 else one for at, one in enumerate(pieces)]
    try:
        return _with_keys("".join(written))
    except LiteralError:
        return text


def _with_keys(text: str) -> str:
    """The text with quotes around keys that have none; raises `LiteralError` for a text that does not end."""
    pieces: list[str] = []
    at, word = 0, 0
    while at < len(text):
        found, mark = _MARKS.find(text, at, True)
        if mark == '"':
            end = _text_end(text, found)
            at = end
            continue
        if mark == ":" and (bare := text[word:found].strip()) and not bare.startswith('"'):
            pieces.append(f"{text[word:found].replace(bare, to_json(bare), 1)}:")
        else:
            pieces.append(text[word : found + 1])
        at = word = found + 1
    pieces.append(text[word:])
    return "".join(pieces)


def _text_end(text: str, start: int) -> int:
    at = start + 1
    while at < len(text):
        if text[at] == '"':
            return at + 1
        at += 2 if text[at] == "\\" else 1
    raise LiteralError("a text that does not end")
