"""The durations of a request's phases, for answers to requests with `return_timing`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Timing(Struct):
    """Seconds from arrival to the first step, to the first token, to the last token, and the totals.

    None where a request did not reach that phase. Of several prompts, the one that ended last counts.
    """

    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None


def timing(metrics: Any) -> Timing:
    """The times of a request from its `RequestMetrics`."""
    if metrics is None:
        return Timing()
    arrival, first = metrics.arrival_time, metrics.first_token_time
    scheduled, last = metrics.first_scheduled_time, metrics.last_token_time
    return Timing(
        queue_seconds=_between(arrival, scheduled),
        prefill_seconds=_between(scheduled, first),
        decode_seconds=_between(first, last),
        first_token_seconds=_between(arrival, first),
        total_seconds=_between(arrival, metrics.finished_time or last),
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(end - start, 0.0), 6)
