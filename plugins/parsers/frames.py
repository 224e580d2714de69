"""Removes the tags that a format puts around its answer, from the content that another reader has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frame.interfaces import Content, OutputEvent, OutputReader

from .scan import Markers, Scan


@dataclass(frozen=True)
class Frame:
    """Tags before and after an answer.

    `special`: they are special tokens, which an answer does not mention, and go wherever they stand. Other tags go only
    at the very beginning and, where the answer began with one, at the very end.
    """

    begin: Sequence[str] = ()
    end: Sequence[str] = ()
    special: bool = False


#: The tags around answers of Cohere's models.
COHERE_FRAME = Frame(
    begin=("<|START_RESPONSE|>", "<|START_TEXT|>"), end=("<|END_RESPONSE|>", "<|END_TEXT|>"), special=True
)


class FramedReader(OutputReader):
    """Passes on the events of `reader` without the tags of `frame` and without white space next to them."""

    def __init__(self, reader: OutputReader, frame: Frame) -> None:
        self._reader = reader
        self._frame = frame
        self._tags = Markers((*frame.begin, *frame.end))
        self._scan = Scan()
        self._held = ""  # white space, or a tag that ends the answer if nothing follows
        self._in_tag = False  # whether `_held` begins with a tag
        self._fresh = self._opened = False
        self._said = False
        self._events: list[OutputEvent] = []

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        """Takes new text."""
        return self._passed(self._reader.feed(text, token_ids))

    def finish(self) -> list[OutputEvent]:
        """Ends the output: returns the events of the text that was held back."""
        found = self._passed(self._reader.finish())
        self._flush()
        return [*found, *self._taken()]

    def _passed(self, events: Sequence[OutputEvent]) -> list[OutputEvent]:
        for event in events:
            if not isinstance(event, Content):
                self._flush()
                self._events.append(event)
            elif event.text:
                self._scan.feed(event.text)
                self._read()
        return self._taken()

    def _taken(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        """Ends a stretch of content: a tag that was held back has ended the answer."""
        self._scan.ended = True
        self._read()
        self._scan = Scan()
        if not self._in_tag and self._held:
            self._events.append(Content(self._held))
        self._held, self._in_tag = "", False

    def _read(self) -> None:
        while True:
            text, tag = self._scan.until(self._tags)
            self._emit(text)
            if tag is None:
                return
            if self._frame.special:
                self._held, self._fresh = "", True
            elif tag in self._frame.begin and not self._said:
                self._held, self._fresh, self._opened = "", True, True
            elif tag in self._frame.end and self._opened and not self._in_tag:
                self._held, self._in_tag = self._held + tag, True
            else:
                self._emit(tag)

    def _emit(self, text: str) -> None:
        """Emits content; white space at its end is held back until more content follows."""
        if self._fresh:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._events.append(Content(self._held + body))
            self._said, self._fresh = True, False
            self._held, self._in_tag = text[len(body) :], False
        else:
            self._held += text
