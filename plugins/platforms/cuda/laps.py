"""Seconds of what a start does one after the other, for a line of its log."""

from __future__ import annotations

import time


class Laps:
    """`end` says what has ended since the last one; as text: each with its seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._ended: list[tuple[str, float]] = []

    def end(self, name: str) -> None:
        """`name` began when this was made, or when the lap before it ended, and ends now."""
        now = time.perf_counter()
        self._ended.append((name, now - self._last))
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._ended)
