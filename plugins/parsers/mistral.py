"""Mistral's tool calls, which have two forms under one marker."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from frame.interfaces import OutputEvent, OutputReader, ParserRequest

from .call_tags import TemplateCalls
from .json_calls import JsonCallReader
from .named_calls import NamedCallReader, NamedFormat
from .scan import Markers, Scan


class MistralParser(TemplateCalls):
    """`[TOOL_CALLS]` and a JSON list, or a name and its JSON, with or without `[CALL_ID]` and `[ARGS]`: Mistral."""

    special_tokens = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    form = NamedFormat(begin=("[TOOL_CALLS]",), separators=("[ARGS]",), identifier="[CALL_ID]")

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader that decides between the two forms at the first call."""
        return _MistralReader(
            JsonCallReader(request, begin=("[TOOL_CALLS]",)), NamedCallReader(request, self.form), "[TOOL_CALLS]"
        )

    def new_id(self) -> str:
        """Nine letters and digits: Mistral's templates refuse other ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _MistralReader(OutputReader):
    """Passes the text to the readers of both forms. The text after the first marker decides which reader goes on."""

    def __init__(self, objects: OutputReader, named: OutputReader, marker: str) -> None:
        self._readers = [objects, named]
        self._marker = marker
        self._markers = Markers((marker,))
        self._scan = Scan()
        self._waiting: list[str] | None = None

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        """Takes new text."""
        del token_ids
        if len(self._readers) == 1:
            return self._pass(text)
        if text:
            self._scan.feed(text)
        return self._read()

    def finish(self) -> list[OutputEvent]:
        """Ends the output: returns the events of the text that was held back."""
        self._scan.ended = True
        events = self._read() if len(self._readers) > 1 else []
        events += self._pass(("".join(self._waiting or ())) + self._scan.take(len(self._scan.text)))
        return [*events, *self._readers[0].finish()]

    def _read(self) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        if self._waiting is None:
            text, marker = self._scan.until(self._markers)
            events = self._pass(text)
            if marker is None:
                return events
            self._waiting = [marker]
        start = self._scan.at
        found = self._scan.skip_space()
        self._waiting.append(self._scan.text[start : self._scan.at])
        if not found:
            return events
        self._readers = [self._readers[0 if self._scan.text[self._scan.at] in "[{" else 1]]
        waiting, self._waiting = "".join(self._waiting), None
        return [*events, *self._pass(waiting + self._scan.take(len(self._scan.text)))]

    def _pass(self, text: str) -> list[OutputEvent]:
        """Passes text to the remaining readers; up to the marker their events are equal, so one list is returned."""
        events: list[OutputEvent] = []
        for reader in reversed(self._readers):
            events = reader.feed(text) if text else []
        return events
