"""First come, first served: the newest request is preempted first."""

from __future__ import annotations

from typing import Any

from frame.interfaces import Schedulable, SchedulerPolicy


class FirstComeFirstServedPolicy(SchedulerPolicy):
    """Orders by arrival; priorities are ignored."""

    def key(self, request: Schedulable) -> tuple[Any, ...]:
        return (request.arrival,)
