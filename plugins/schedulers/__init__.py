"""Scheduling policies that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_schedulers() -> list[Provider]:
    """The orders in which requests are admitted and preempted."""
    return [
        Provider(
            name="fcfs",
            target="frame.plugins.schedulers.fcfs:FirstComeFirstServedPolicy",
            api=_API,
            summary="First come, first served.",
            preference=10,
        ),
        Provider(
            name="fair",
            target="frame.plugins.schedulers.fair:FairPolicy",
            api=_API,
            summary="API keys take turns by tokens; the default where keys are set.",
        ),
        Provider(
            name="priority",
            target="frame.plugins.schedulers.priority:PriorityPolicy",
            api=_API,
            summary="Lower priority values first, then first come, first served.",
        ),
    ]
