"""The counters of the last two minutes, one sample a second at most, for views of the engine that open later.

Samples are taken after steps, so an idle engine takes none and is not woken. Knows no engine and no server.
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
        """After each step. `idle`: nothing is left to do, so that the sample shows the end of the work."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SAMPLE_SECONDS
        elif idle:
            self._samples.pop()  # this second's sample is taken anew, so that sequences of short requests add none
        else:
            return
        self._samples.append({"time": time.time(), **msgspec.structs.asdict(self._read())})

    def samples(self) -> list[dict[str, Any]]:
        """The counters as `EngineStats` names them, each with its `time` in Unix seconds; oldest first."""
        latest = time.time() - MAX_SAMPLES * SAMPLE_SECONDS
        return [sample for sample in self._samples if sample["time"] >= latest]
