"""A word from a connector's thread to the engine of its process: what it waits for has come, so that it asks at once.

Where several engines share a process a word wakes any of them; all of them ask again soon enough without one.
"""

from __future__ import annotations

import threading

_told = threading.Event()


def tell() -> None:
    """Wakes an engine that waits; from any thread."""
    _told.set()


def wait(seconds: float) -> None:
    """Returns after so many seconds, or at once when something was told since the last call."""
    _told.wait(seconds)
    _told.clear()


def forget() -> None:
    """Called before all is asked again that words could be about: what was told before ends no wait."""
    _told.clear()
