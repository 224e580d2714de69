"""How a process waits for what another does, on processors that others may want as well.

A sleeper takes tens of microseconds to wake, which a step cannot spare, and who looks on takes a whole processor. So
one looks on while there is much to do, gives way between two looks, and sleeps where others want the processor: who
gives way to a thread that computes gets the processor back milliseconds later, while a sleeper is woken at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

#: Seconds that giving way takes where another thread wants the processor, and for which one then expects others there.
_TAKEN_SECONDS, _CROWDED_SECONDS = 300e-6, 1.0
#: Seconds of looking where others want the processor, and for what nobody knows to come soon.
_IDLE_SECONDS = 50e-6


class Lookout:
    """Looks for up to `busy_seconds` for what has lately come within that time, else much shorter; for one thread."""

    def __init__(self, busy_seconds: float) -> None:
        self._busy_seconds = busy_seconds
        self._crowded_until = 0.0
        self.waited(float("inf"))

    def waited(self, seconds: float) -> None:
        """Notes how long it took until something came."""
        soon = seconds < self._busy_seconds
        self._eager_seconds = self._busy_seconds if soon else min(self._busy_seconds, _IDLE_SECONDS)

    def look(self, found: Callable[[], bool], most_seconds: float) -> bool:
        """Looks until something is `found`; False when it is time to sleep, at the latest after `most_seconds`."""
        begin = now = time.monotonic()
        until = begin + min(self._eager_seconds, most_seconds)
        while now < until:
            now = self._give_way()
            if found():
                return True
            if now < self._crowded_until:
                until = min(until, begin + _IDLE_SECONDS)
        return False

    def pause(self) -> None:
        """Lets others have the processor between two looks at what comes for certain; by sleep, if it may not look."""
        if not self._busy_seconds or time.monotonic() < self._crowded_until:
            time.sleep(_IDLE_SECONDS)
        else:
            self._give_way()

    def _give_way(self) -> float:
        """Lets another thread have the processor for a while; returns the time after that."""
        begin = time.monotonic()
        os.sched_yield()
        now = time.monotonic()
        if now - begin > _TAKEN_SECONDS:
            self._crowded_until = now + _CROWDED_SECONDS
        return now
