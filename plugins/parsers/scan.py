"""Reads text that arrives in pieces: a cursor over the unread text, and markers that may be cut by the end of a piece.

Readers consume all text that cannot belong to a marker, so that unread text stays shorter than the longest marker and
the time is linear in the text, however it is cut into pieces. Knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[\s,:;{}\[\]\"<]")
_NO_SPACE = re.compile(r"\S")
#: Most white space between two markers that together end a value.
_MAX_SPACE = 16
_SOME_SPACE = re.compile(rf"\s{{0,{_MAX_SPACE + 1}}}")


class Markers:
    """Literal texts to search for. Where two start at the same place, the longer one is found."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = sorted({text for text in texts if text}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        self._first = re.compile("|".join(sorted({re.escape(text[0]) for text in self.texts})) or "(?!)")
        self._longest = max(map(len, self.texts), default=0)

    def find(self, text: str, at: int, ended: bool, most: int | None = None) -> tuple[int, str | None]:
        """(start, marker) of the first marker from `at` on; (n, None): none before n, but one may start at n.

        `most` limits the search to that many characters; n may lie just behind them.
        """
        stop = len(text) if most is None else min(len(text), at + most + self._longest + 1)
        match = self._pattern.search(text, at, stop)
        end = stop if match is None else match.start()
        ended = ended or stop < len(text)
        if not ended:
            partial = self._partial(text, at, end + 1)
            if partial is not None and (match is None or partial < end or self._may_grow(text, match)):
                return min(partial, end), None
        return end, None if match is None else match.group()

    def at(self, text: str, at: int, ended: bool) -> str | None:
        """The marker that starts at `at`; "" when none does; None when more text is needed to tell."""
        rest = len(text) - at
        if not ended and rest < self._longest:
            tail = text[at:]
            if any(len(one) > rest and one.startswith(tail) for one in self.texts):
                return None
        return next((one for one in self.texts if text.startswith(one, at)), "")

    def _may_grow(self, text: str, match: re.Match[str]) -> bool:
        """Whether more text could turn `match` into a longer marker."""
        if len(text) - match.start() >= self._longest:
            return False
        tail = text[match.start() :]
        return any(len(one) > len(tail) and one.startswith(tail) for one in self.texts)

    def _partial(self, text: str, at: int, stop: int) -> int | None:
        """The first place before `stop` where a marker begins that the end of the text cuts."""
        place = max(at, len(text) - self._longest + 1)
        while place < min(stop, len(text)):
            first = self._first.search(text, place)
            if first is None or first.start() >= stop:
                return None
            place = first.start()
            tail = text[place:]
            if any(one.startswith(tail) and len(one) > len(tail) for one in self.texts):
                return place
            place += 1
        return None


class Scan:
    """The unread text of one output. `ended`: no more text will come."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._mark: int | None = None
        self._marked: list[str] = []

    def feed(self, text: str) -> None:
        """Adds text."""
        if self._mark is not None:
            self._marked.append(self.text[self._mark : self.at])
            self._mark = 0
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def empty(self) -> bool:
        """Whether everything was read."""
        return self.at >= len(self.text)

    def mark(self) -> None:
        """Begins to remember the text that is read."""
        self._marked.clear()
        self._mark = self.at

    def unmark(self) -> str:
        """The text that was read since `mark`, which is then forgotten; empty without a mark."""
        if self._mark is None:
            return ""
        text = "".join(self._marked) + self.text[self._mark : self.at]
        self._mark = None
        self._marked.clear()
        return text

    def take(self, end: int) -> str:
        """Reads up to a place in `text`."""
        taken = self.text[self.at : end]
        self.at = max(end, self.at)
        return taken

    def skip_space(self) -> bool:
        """Reads white space; returns whether something else follows."""
        match = _NO_SPACE.search(self.text, self.at)
        self.at = len(self.text) if match is None else match.start()
        return match is not None

    def until(self, markers: Markers, most: int | None = None) -> tuple[str, str | None]:
        """Reads up to and over a marker; returns the text before it, and the marker if it has arrived.

        When more than `most` characters come before a marker, reads that many and no marker.
        """
        end, marker = markers.find(self.text, self.at, self.ended, most)
        if most is not None and end - self.at > most:
            return self.take(self.at + most), None
        text = self.take(end)
        if marker is not None:
            self.at += len(marker)
        return text, marker

    def over(self, markers: Markers) -> str | None:
        """Reads over a marker if one comes next; "" when none does, None when more text is needed to tell."""
        marker = markers.at(self.text, self.at, self.ended)
        if marker:
            self.at += len(marker)
        return marker


class Stops:
    """Markers that end a JSON value whose closing brackets are missing.

    Outside of quoted text any of them ends the value. Inside quoted text, which may mention a marker, only one of
    `closers` does, and only when another marker or the end of the output follows.
    """

    def __init__(self, closers: Iterable[str] = (), others: Iterable[str] = ()) -> None:
        self._closers = frozenset(closers)
        self.markers = Markers((*self._closers, *others))

    def quoted(self, scan: Scan, at: int, marker: str) -> bool | None:
        """Whether a marker at `at`, inside quoted text, ends the value; None when more text is needed to tell."""
        return marker in self._closers and follows(scan, at + len(marker), self.markers)


def follows(scan: Scan, at: int, markers: Markers) -> bool | None:
    """Whether at most a little white space lies between `at` and a marker or the end; None: more text is needed."""
    match = _SOME_SPACE.match(scan.text, at)
    end = at if match is None else match.end()
    if end - at > _MAX_SPACE:
        return False
    if end >= len(scan.text):
        return True if scan.ended else None
    marker = markers.at(scan.text, end, scan.ended)
    return None if marker is None else bool(marker)


_NO_STOPS = Stops()


class JsonSpan:
    """Finds the end of one JSON value by its brackets and quotes, without checking that it is valid.

    `broken`: a marker of `stops`, which stays unread, has ended the value.
    """

    def __init__(self, stops: Stops = _NO_STOPS) -> None:
        self.broken = False
        self._stops = stops
        self._depth = 0
        self._in_string = False
        self._scalar: bool | None = None

    def take(self, scan: Scan) -> tuple[str, bool]:
        """Reads the part of the value that has arrived; True when it is complete."""
        if self._scalar is None:
            self._scalar = scan.text[scan.at] not in '"{['
        if self._scalar:
            match = _AFTER_SCALAR.search(scan.text, scan.at)
            return scan.take(len(scan.text) if match is None else match.start()), match is not None or scan.ended
        at, text, markers = scan.at, scan.text, self._stops.markers
        while True:
            stop, marker = markers.find(text, at, scan.ended) if markers.texts else (len(text), None)
            at, done = self._structure(text, at, stop, scan.ended)
            if done or marker is None or at < stop:
                return scan.take(min(at, len(text))), done
            if at > stop:  # the first character of the marker is escaped
                continue
            ends = not self._in_string or self._stops.quoted(scan, stop, marker)
            if ends is None:
                return scan.take(stop), False
            if ends:
                self.broken = True
                return scan.take(stop), True
            at, done = self._structure(text, stop, stop + 1, scan.ended)

    def _structure(self, text: str, at: int, stop: int, ended: bool) -> tuple[int, bool]:
        """Follows brackets and quotes up to `stop`; returns the place reached, and whether the value ends there."""
        while at < stop:
            match = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at, stop)
            if match is None:
                return stop, False
            at = match.end()
            character = match.group()
            if character == "\\":
                if at == len(text) and not ended:
                    return at - 1, False  # waits for the escaped character
                at += 1
                continue
            if character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                return at, True
        return at, False
