"""Equal shares: owners, such as API keys, take turns, measured in tokens."""

from __future__ import annotations

from typing import Any

from frame.interfaces import Schedulable, SchedulerPolicy


class FairPolicy(SchedulerPolicy):
    """Orders by turn, then by arrival; priorities are ignored.

    A running request is preempted for a waiting one of an owner that has at least two fewer requests running.
    """

    def key(self, request: Schedulable) -> tuple[Any, ...]:
        return (request.turn, request.arrival)

    def gives_way(self, running: Schedulable, waiting: Schedulable) -> bool:
        return running.owner != waiting.owner and running.owner_running > waiting.owner_running + 1
