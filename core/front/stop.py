"""Stop strings over streaming text: finds them, and holds back what may become one. Knows no token."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one output.

    The stop string that is complete first ends the text; of two that end at the same character, the longer one does. So
    the result does not depend on how the text was split into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes new text; returns what may be shown now and the stop string that ended the output, if one did."""
        buffer = self._held + text
        end, match = len(buffer) + 1, None
        for stop in self._stops:
            # a match cannot end inside what was held: it would have been found then
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and start + len(stop) < end:
                end, match = start + len(stop), stop
        if match is not None:
            self._held = ""
            return buffer[: end if self._include else end - len(match)], match
        keep = self._num_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """The text still held back, when the output has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        """The length of the longest suffix of `buffer` that is a prefix of a stop string."""
        for length in range(min(len(self._stops[0]) - 1, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
