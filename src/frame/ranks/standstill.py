"""Which of several engines the others wait for: all stand still then, and it has come less far than they.

Each engine notes in its journal, twice a second, how far its workers are and for how long they have been there. Their
supervisors read that when no step ends any more. Knows no process and no step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from frame.core.interfaces.executor import Progress

#: Seconds between two notes, and for which an engine must have stood still when it made the newest one.
NOTE_SECONDS, STILL_SECONDS = 0.5, 1.5


class Standing(NamedTuple):
    """Where an engine is: the newest step that all its workers began, and in it exchanges with other engines.

    Where its workers differ, the one that is behind counts. `still_seconds`: since when it has been there.
    """

    step: int
    exchanges: int
    still_seconds: float


class Notebook(Protocol):
    """Where notes are written."""

    def stand(self, step: int, exchanges: int, still_seconds: float) -> None:
        """Replaces the note before."""


class StandingNotes:
    """A thread that writes into `notebook` how far `progress()` is, until `close`."""

    def __init__(self, notebook: Notebook, progress: Callable[[], Progress | None]) -> None:
        self._notebook, self._progress = notebook, progress
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frame-standing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when nothing is asked and written any more."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        seen, since = None, time.monotonic()
        while not self._end.wait(NOTE_SECONDS):
            found, now = self._progress(), time.monotonic()
            if found is None:
                return
            if found != seen:
                seen, since = found, now
            self._notebook.stand(found.step, found.exchanges, now - since)


def engine_behind(standings: Mapping[int, Standing | None]) -> tuple[int, str] | None:
    """The engine for which all others wait, and by how much it is behind, in words; None where that is not known.

    Engines of which one still moved were not waiting: their notes are of different moments, and tell nothing.
    """
    known = {rank: one for rank, one in standings.items() if one is not None and one.still_seconds >= STILL_SECONDS}
    if len(known) < max(len(standings), 2):
        return None
    places = {rank: (one.step, one.exchanges) for rank, one in known.items()}
    least, most = min(places.values()), max(places.values())
    lagging = [rank for rank, place in places.items() if place == least]
    if least == most or len(lagging) > 1:
        return None
    at = f"it is at step {least[0]} and exchange {least[1]} with the other engines in it"
    return lagging[0], f"{at}, and they wait for it at step {most[0]} and exchange {most[1]}"
