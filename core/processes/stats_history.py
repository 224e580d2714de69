"""Samples of the engine's counters, one a second over the last two minutes, for live views that are opened later.

Samples are taken after steps, so an idle engine takes none and is not woken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from ..interfaces.engine import EngineStats

#: Seconds between samples, and how many are kept.
SAMPLE_SECONDS = 1.0
MAX_SAMPLES = 120


class StatsHistory:
    """`read` gives the counters; it is called once for each sample."""

    def __init__(self, read: Callable[[], EngineStats]) -> None:
        self._read = read
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._next = 0.0

    def note(self, idle: bool) -> None:
        """Called after each step. `idle`: no work is left, so a sample is taken at once to show that."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SAMPLE_SECONDS
        elif idle:
            self._samples.pop()  # replaces the sample of this second, so that a series of short requests adds none
        else:
            return
        self._samples.append({"time": time.time(), **msgspec.structs.asdict(self._read())})

    def samples(self) -> list[dict[str, Any]]:
        """The counters as `EngineStats` names them, each with its `time` in Unix seconds; oldest first."""
        latest = time.time() - MAX_SAMPLES * SAMPLE_SECONDS
        return [sample for sample in self._samples if sample["time"] >= latest]
