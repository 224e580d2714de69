"""Priorities: the request with the lowest value is served first and preempted last."""

from __future__ import annotations

from typing import Any

from frame.interfaces import Schedulable, SchedulerPolicy


class PriorityPolicy(SchedulerPolicy):
    """Orders by priority, then by arrival."""

    def key(self, request: Schedulable) -> tuple[Any, ...]:
        return (request.priority, request.arrival)
