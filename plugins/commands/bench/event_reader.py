"""Parses server-sent events from chunks of bytes that may end anywhere in an event."""

from __future__ import annotations


class EventReader:
    """Takes chunks in order and returns the data of every event that a chunk completes.

    Lines end in LF, CR LF or CR; a blank line ends an event; several `data` lines make one text (WHATWG HTML, 9.2).
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._skip_newline = False
        self._first = True

    def feed(self, chunk: bytes) -> list[str]:
        """The events that `chunk` completes."""
        if self._skip_newline and chunk:
            # The carriage return before may have been half of a CR LF.
            chunk = chunk.removeprefix(b"\n")
            self._skip_newline = False
        if chunk.endswith(b"\r"):
            self._skip_newline = True
        self._rest += chunk
        if b"\n" not in chunk and b"\r" not in chunk:
            return []
        lines = bytes(self._rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = bytearray(lines.pop())
        events = []
        for line in lines:
            event = self._line(line)
            if event is not None:
                events.append(event)
        return events

    def _line(self, line: bytes) -> str | None:
        if self._first:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._first = False
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data).decode("utf-8", "replace") if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
