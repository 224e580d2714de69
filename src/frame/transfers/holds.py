"""Whose blocks a KV connector keeps after their requests' end, and for how long it may once it has failed.

Its workers may never hear then that they are to read them, and nobody would give them back. Knows no block.
"""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("frame.transfers")

#: Seconds after which blocks that a failed connector keeps are given back: no transfer takes as long.
MAX_SECONDS = 600.0


class Holds:
    """The requests whose blocks the connector with this `name` keeps: as long as it likes, until it has failed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since: dict[str, float] = {}
        self._failed = False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since

    def add(self, request_id: str) -> None:
        """Called when a request ended whose blocks are kept."""
        self._since[request_id] = time.monotonic()

    def discard(self, request_id: str) -> None:
        """Called when they are given back; unknown ids are ignored."""
        self._since.pop(request_id, None)

    def fail(self) -> None:
        """Called when the connector raised where it may have lost what it was to tell or to hear."""
        if not self._failed:
            self._failed, now = True, time.monotonic()
            self._since = dict.fromkeys(self._since, now)

    def take_overdue(self) -> list[str]:
        """The requests whose blocks were kept for too long since the connector failed; they are forgotten here."""
        if not self._failed:
            return []
        latest = time.monotonic() - MAX_SECONDS
        overdue = [name for name, since in self._since.items() if since <= latest]
        for name in overdue:
            del self._since[name]
        if overdue:
            logger.warning(
                "KV connector %s has failed and kept blocks of ended requests for %g s; they are given back: %s",
                self._name,
                MAX_SECONDS,
                ", ".join(overdue),
            )
        return overdue
