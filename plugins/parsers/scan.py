"""Text that arrives in pieces: a cursor over what is not read yet, and markers that a piece may end within.

Whoever reads consumes all that can be no part of a marker, so that what waits is shorter than the longest marker and
the time is linear in the text, however it is cut. Knows no format.
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
    """Literal texts to look for. Of two that start at one place, the longer counts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = sorted({text for text in texts if text}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        self._first = re.compile("|".join(sorted({re.escape(text[0]) for text in self.texts})) or "(?!)")
        self._longest = max(map(len, self.texts), default=0)

    def find(self, text: str, at: int, ended: bool, most: int | None = None) -> tuple[int, str | None]:
        """Where the first marker from `at` on starts, and which; (n, None): none before n, and one may start there.

        `most`: looks no further than so many characters; n may lie just behind them.
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
        """The marker that starts at `at`; "" when none does; None when that cannot be told yet."""
        rest = len(text) - at
        if not ended and rest < self._longest:
            tail = text[at:]
            if any(len(one) > rest and one.startswith(tail) for one in self.texts):
                return None
        return next((one for one in self.texts if text.startswith(one, at)), "")

    def _may_grow(self, text: str, match: re.Match[str]) -> bool:
        """Whether a longer marker may start where `match` does, for which the text does not suffice yet."""
        if len(text) - match.start() >= self._longest:
            return False
        tail = text[match.start() :]
        return any(len(one) > len(tail) and one.startswith(tail) for one in self.texts)

    def _partial(self, text: str, at: int, stop: int) -> int | None:
        """The first place before `stop` from which to the text's end a marker has begun."""
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
    """The text of one output from where it is read on. `ended`: no more will come."""

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
        """Remembers what is read from here on."""
        self._marked.clear()
        self._mark = self.at

    def unmark(self) -> str:
        """What was read since `mark`; remembers no longer. Empty without a mark."""
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
        """Reads up to a marker and over it; the text before it, and the marker if it is there already.

        Reads at most `most` characters before a marker, and then none of them.
        """
        end, marker = markers.find(self.text, self.at, self.ended, most)
        if most is not None and end - self.at > most:
            return self.take(self.at + most), None
        text = self.take(end)
        if marker is not None:
            self.at += len(marker)
        return text, marker

    def over(self, markers: Markers) -> str | None:
        """Reads over a marker that comes next; "" when none does, None when that cannot be told yet."""
        marker = markers.at(self.text, self.at, self.ended)
        if marker:
            self.at += len(marker)
        return marker


class Stops:
    """Markers that end a JSON value which its brackets do not end, because some are missing.

    Any of them does outside of quoted text. Inside it, where a text may quote them, only one of `closers` does, and
    only when another marker or the end of the output follows.
    """

    def __init__(self, closers: Iterable[str] = (), others: Iterable[str] = ()) -> None:
        self._closers = frozenset(closers)
        self.markers = Markers((*self._closers, *others))

    def quoted(self, scan: Scan, at: int, marker: str) -> bool | None:
        """Whether the marker at a place inside quoted text ends the value all the same; None: not to be told yet."""
        return marker in self._closers and follows(scan, at + len(marker), self.markers)


def follows(scan: Scan, at: int, markers: Markers) -> bool | None:
    """Whether only a little white space stands between a place and a marker, or the end; None: not to be told yet."""
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
    """Finds the end of one JSON value by its brackets and quotes; whether it is right inside is not checked.

    `broken`: one of `stops`, which is left unread, has ended it instead.
    """

    def __init__(self, stops: Stops = _NO_STOPS) -> None:
        self.broken = False
        self._stops = stops
        self._depth = 0
        self._in_string = False
        self._scalar: bool | None = None

    def take(self, scan: Scan) -> tuple[str, bool]:
        """Reads what is there of the value, which starts at its first character; and whether it is complete."""
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
            if at > stop:  # its first character is escaped
                continue
            ends = not self._in_string or self._stops.quoted(scan, stop, marker)
            if ends is None:
                return scan.take(stop), False
            if ends:
                self.broken = True
                return scan.take(stop), True
            at, done = self._structure(text, stop, stop + 1, scan.ended)

    def _structure(self, text: str, at: int, stop: int, ended: bool) -> tuple[int, bool]:
        """Follows brackets and quotes up to a place; where it came to, and whether the value is complete there."""
        while at < stop:
            match = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at, stop)
            if match is None:
                return stop, False
            at = match.end()
            character = match.group()
            if character == "\\":
                if at == len(text) and not ended:
                    return at - 1, False  # until what it escapes is there
                at += 1
                continue
            if character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                return at, True
        return at, False
