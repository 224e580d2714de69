"""One tool call that is a JSON object of a name and its arguments. Knows no model's markers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .calls import MAX_NAME, CallReader, State
from .literals import whole_characters
from .scan import JsonSpan, Stops


class JsonCall:
    """One call as a JSON object: `{"name": …, "arguments": {…}}`, in any order; further fields are ignored.

    A reader calls `step` to read the text that has arrived. Once the name is known, arguments are passed on as they
    are written; arguments that are a JSON text in quotes are unpacked. `stops` end a call whose brackets do not close.
    """

    def __init__(
        self,
        reader: CallReader,
        known_only: bool = False,
        names: Sequence[str] = ("name",),
        arguments: Sequence[str] = ("arguments", "parameters"),
        stops: Stops | None = None,
    ) -> None:
        self._reader = reader
        self._stops = stops or Stops()
        self._known_only = known_only
        self._names = names
        self._arguments = arguments
        self._span: JsonSpan | None = None
        self._texts: list[str] = []
        self._key = ""
        self._state: State = self._open
        self._id = ""
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self._streaming = False
        self.begun = False
        self.ended = False
        self.failed = False

    def step(self) -> bool:
        """Reads text; returns whether to call it again before more text comes. Sets `ended` or `failed` at the end."""
        return self._state()

    def _fail(self) -> bool:
        """Ends a call that is not well-formed; one whose arguments are complete still counts."""
        if self.begun and not self._streaming:
            self._complete()
        else:
            self.failed = True
        return True

    def _next(self) -> str | None:
        """The next character that is not white space, without reading it; None when it has not arrived."""
        scan = self._reader.scan
        return scan.text[scan.at] if scan.skip_space() else None

    def _open(self) -> bool:
        if self._next() is None:
            return False
        self._reader.scan.at += 1  # the reader has seen the brace
        self._state = self._before_key
        return True

    def _before_key(self) -> bool:
        character = self._next()
        if character is None:
            return False
        if character == "}":
            self._reader.scan.at += 1
            return self._complete()
        if character == ",":
            self._reader.scan.at += 1
            return True
        if character != '"':
            return self._fail()
        return self._begin_value(self._in_key)

    def _in_key(self) -> bool:
        if not self._collect():
            return False
        if self._broken:
            return self._fail()
        key = _loads("".join(self._texts))
        self._key = key if isinstance(key, str) else ""
        if self._known_only and self._key not in (*self._names, *self._arguments, "id", "type"):
            return self._fail()
        self._state = self._colon
        return True

    def _colon(self) -> bool:
        character = self._next()
        if character is None:
            return False
        if character != ":":
            return self._fail()
        self._reader.scan.at += 1
        self._state = self._value
        return True

    def _value(self) -> bool:
        character = self._next()
        if character is None:
            return False
        if character in ",:}]":
            return self._fail()
        self._begin_value(self._in_value)
        if self._key in self._arguments and self._name is not None and not self.begun and character == "{":
            if not self._begin():
                return True
            self._streaming, self._state = True, self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        piece, done = self._piece()
        self._reader.arguments(piece)
        if done:
            self._streaming, self._state = False, self._before_key
            if self._broken:
                return self._complete()
        return done

    def _in_value(self) -> bool:
        if not self._collect():
            return False
        if self._broken:
            return self._fail()
        text, self._state = "".join(self._texts), self._before_key
        if self._key in self._names and self._name is None:
            name = _loads(text)
            if not isinstance(name, str) or not self._may_be_called(name):
                return self._fail()
            self._name = name
            if self._early is not None and self._begin():
                self._reader.arguments(self._early)
        elif self._key in self._arguments and not self.begun:
            self._early = self._unpacked(text)
            if self._early is None:
                return self._fail()
            if self._name is not None and self._begin():
                self._reader.arguments(self._early)
        elif self._key == "id":
            call_id = _loads(text)
            self._id = call_id if isinstance(call_id, str) and len(call_id) <= MAX_NAME else ""
        return True

    @staticmethod
    def _unpacked(text: str) -> str | None:
        """Arguments as JSON text: an object as it is, one in quotes unpacked, {} for null; None for anything else."""
        if text.startswith("{"):
            return text
        value = _loads(text)
        if value is None:
            return "{}" if text == "null" else None
        return value if isinstance(value, str) and isinstance(_loads(value), dict) else None

    def _begin(self) -> bool:
        name = self._name or ""
        if not self._may_be_called(name):
            self.failed = True
            return False
        self.begun = True
        self._reader.begin(name, self._id)
        return True

    def _may_be_called(self, name: str) -> bool:
        return self._reader.is_name(name) and not (self._known_only and self._reader.request.tool(name) is None)

    def _complete(self) -> bool:
        if not self.begun:
            if self._name is None or not self._begin():
                self.failed = True
                return True
            self._reader.arguments(self._early or "{}")
        self.ended = True
        self._reader.end()
        return True

    def _collect(self) -> bool:
        """Reads more of a value into `_texts`; returns whether it is complete."""
        piece, done = self._piece()
        self._texts.append(piece)
        return done

    def _begin_value(self, state: State) -> bool:
        self._span, self._state = JsonSpan(self._stops), state
        self._texts.clear()
        return True

    @property
    def _broken(self) -> bool:
        return self._span is not None and self._span.broken

    def _piece(self) -> tuple[str, bool]:
        if self._span is None or self._reader.scan.empty:
            return "", False
        return self._span.take(self._reader.scan)


class KeyedCall(JsonCall):
    """One call as a JSON object of one field, whose key is the name: `{"get_weather": {…}}`."""

    def _in_key(self) -> bool:
        known = self._name is not None
        read = super()._in_key()
        if known or not read or self.failed:
            return read
        if not self._may_be_called(self._key):
            return self._fail()
        self._name, self._names, self._arguments = self._key, (), (self._key,)
        return read


def _loads(text: str) -> Any:
    try:
        value = json.loads(text)
        return whole_characters(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
