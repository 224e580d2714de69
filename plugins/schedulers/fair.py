"""Equal shares: owners, such as API keys, take turns by tokens."""

from __future__ import annotations

from typing import Any

from frame.interfaces import Schedulable, SchedulerPolicy


class FairPolicy(SchedulerPolicy):
    """Orders by turns, then by arrival, so that one owner's requests are served as they come.

    An owner that has two requests more than another one makes room for it; priorities are ignored.
    """

    def key(self, request: Schedulable) -> tuple[Any, ...]:
        return (request.turn, request.arrival)

    def gives_way(self, running: Schedulable, waiting: Schedulable) -> bool:
        return running.owner != waiting.owner and running.owner_running > waiting.owner_running + 1
