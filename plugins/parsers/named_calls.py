"""Tool calls whose name stands between markers, with JSON arguments after it. Knows no model's markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frame.interfaces import ParserRequest

from .calls import MAX_NAME, CallReader
from .scan import JsonSpan, Markers, Stops


@dataclass(frozen=True)
class NamedFormat:
    """`begin NAME [identifier ID] [separator] {JSON} [closer]`, white space allowed between the parts.

    `opener` stands before the first call. `separators` follow the name; with none of them, the name ends where the
    arguments begin. `name_holds_id`: the name is an id such as `functions.NAME:0`.
    """

    begin: Sequence[str]
    separators: Sequence[str] = ()
    identifier: str = ""
    opener: Sequence[str] = ()
    closers: Sequence[str] = ()
    name_holds_id: bool = False


class NamedCallReader(CallReader):
    """Reads calls of a `NamedFormat`."""

    def __init__(self, request: ParserRequest, form: NamedFormat) -> None:
        super().__init__(request)
        self._form = form
        self._outside = Markers((*form.begin, *form.opener))
        self._begin = Markers(form.begin)
        # a brace ends the name too; it is read again as the beginning of the arguments
        self._after_name = Markers((*form.separators, form.identifier, *form.closers, "{"))
        self._after_id = Markers((*form.separators, "{"))
        self._between = Markers((*form.begin, *form.opener, *form.closers))
        self._stops = Stops(form.closers, (*form.begin, *form.opener))
        self._name = self._id = ""
        self._span = JsonSpan()

    def outside(self) -> bool:
        """Reads content up to a marker."""
        marker = self.marked_after_content(self._outside)
        if marker is None:
            return False
        self._open(marker)
        return True

    def _open(self, marker: str) -> None:
        self._name = self._id = ""
        self.state = self._in_name if marker in self._form.begin else self._after_opener

    def _after_opener(self) -> bool:
        if not self.scan.skip_space():
            return False
        marker = self.scan.over(self._begin)
        if marker is None:
            return False
        if marker:
            self._open(marker)
        else:
            self.leave()
        return True

    def _in_name(self) -> bool:
        text, marker = self.scan.until(self._after_name, MAX_NAME + 1 - len(self._name))
        self._name += text
        if len(self._name) > MAX_NAME:
            self.leave()
            return True
        if marker is None:
            return False
        if not self._names()[0]:
            self.leave()
        elif marker == self._form.identifier:
            self.state = self._in_id
        else:
            self._before_arguments_of(marker)
        return True

    def _in_id(self) -> bool:
        text, marker = self.scan.until(self._after_id, MAX_NAME + 1 - len(self._id))
        self._id += text
        if len(self._id) > MAX_NAME:
            self.leave()
            return True
        if marker is None:
            return False
        self._before_arguments_of(marker)
        return True

    def _before_arguments_of(self, marker: str) -> None:
        """Chooses the state after the head of a call, whose last marker was `marker`."""
        if marker in self._form.closers:
            self._begin_call()
            self.arguments("{}")
            self.end()
            self.state = self._after_call_text
            return
        if marker.endswith("{") and marker not in self._form.separators:
            self.scan.at -= 1
        self.state = self._before_arguments

    def _before_arguments(self) -> bool:
        if not self.scan.skip_space():
            return False
        if self.scan.text[self.scan.at] == "{":
            self._begin_call()
            self._span, self.state = JsonSpan(self._stops), self._in_arguments
            return True
        closer = self.scan.over(self._between)
        if closer is None:
            return False
        if closer and closer in self._form.closers:
            self._before_arguments_of(closer)
        else:
            self.scan.at -= len(closer)
            self.leave()
        return True

    def _in_arguments(self) -> bool:
        piece, done = self._span.take(self.scan)
        self.arguments(piece)
        if done:
            self.end()
            self.state = self._after_call_text
        return done

    def _after_call_text(self) -> bool:
        """After a call: reads closing markers, another call, or content."""
        if not self.scan.skip_space():
            return False
        start = self.scan.at
        marker = self.scan.over(self._between)
        if marker is None:
            return False
        if not marker:
            self.state = self.outside
        elif marker not in self._form.closers:
            self.scan.at = start
            self.scan.mark()
            self.scan.at += len(marker)
            self._open(marker)
        return True

    def _begin_call(self) -> None:
        name, call_id = self._names()
        self.begin(name, call_id)

    def _names(self) -> tuple[str, str]:
        """Name and id in the head; an empty name when it cannot be a function's."""
        name, call_id = self._name.strip(), self._id.strip()
        if self._form.name_holds_id:
            call_id = name
            name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
            name = name.removeprefix("functions.")
        return (name, call_id) if self.is_name(name) else ("", "")
