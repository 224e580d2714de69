"""Takes the times of one generation from its arrival to its end."""

from __future__ import annotations

import time
from typing import Any

from .metrics import ServerMetrics


class RequestTimer:
    """Feeds the server's metrics; created when a request arrives and always closed.

    Times between tokens are taken as outputs arrive; the phases come from the text side (`RequestMetrics`), since an
    answer that is not streamed arrives all at once.
    """

    def __init__(self, metrics: ServerMetrics, params: Any) -> None:
        self._metrics = metrics
        self._params = params
        self._first = metrics.histogram("time_to_first_token_seconds")
        self._between = metrics.histogram("inter_token_latency_seconds")
        self._pace = metrics.pace
        self._arrival = self._last = time.perf_counter()
        self._tokens = 0
        self._longest = 0
        self._num_outputs = 0
        self._prompt_tokens: int | None = None
        self._cached_tokens = 0
        self._times: Any = None
        self._total_seconds = 0.0
        self.reason = "abort"

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """Counts the prompt, at the first output."""
        self._prompt_tokens, self._cached_tokens = num_tokens, num_cached
        self._metrics.prompt(num_tokens, num_cached)

    def tokens(self, total: int, longest: int, times: Any) -> None:
        """Counts `total` tokens that arrived now, at most `longest` of one output; `times` are the request's so far."""
        now = time.perf_counter()
        if self._num_outputs:
            self._pace.add(total, (now - self._last) / longest, longest, now)
        else:
            self._pace.begin(total)
            if times is not None and times.first_token_time is not None:
                self._first.observe(max(times.first_token_time - times.arrival_time, 0.0))
        self._times = times
        self._last = now
        self._num_outputs += 1
        self._tokens += total
        self._longest += longest

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of all outputs so far."""
        return (self._prompt_tokens or 0) + self._tokens

    def ends(self, reason: str) -> None:
        """Sets how the request ended; a request without it counts as aborted."""
        self.reason = reason

    def close(self) -> None:
        """Adds the observations to the metrics."""
        metrics = self._metrics
        self._total_seconds = time.perf_counter() - self._arrival
        self._pace.count()
        metrics.finished(self.reason)
        metrics.histogram("e2e_request_latency_seconds").observe(self._total_seconds)
        metrics.histogram("request_params_n").observe(self._params.n)
        if self._params.max_tokens is not None:
            metrics.histogram("request_params_max_tokens").observe(self._params.max_tokens)
        if self._prompt_tokens is not None:
            metrics.histogram("request_prompt_tokens").observe(self._prompt_tokens)
            metrics.histogram("request_generation_tokens").observe(self._tokens)
        self._close_phases()

    def figures(self) -> dict[str, Any]:
        """Tokens and seconds of a closed request, as `RequestReport` names them."""
        return {
            "total_seconds": self._total_seconds,
            "prompt_tokens": self._prompt_tokens or 0,
            "cached_tokens": self._cached_tokens,
            "generated_tokens": self._tokens,
            **self._phases(),
        }

    def _phases(self) -> dict[str, float | None]:
        times = self._times
        if times is None:
            return {}
        arrival, first, scheduled = times.arrival_time, times.first_token_time, times.first_scheduled_time
        return {
            "queue_seconds": between(arrival, scheduled),
            "prefill_seconds": between(scheduled, first),
            "decode_seconds": between(first, times.last_token_time),
            "first_token_seconds": between(arrival, first),
        }

    def _close_phases(self) -> None:
        metrics, phases = self._metrics, self._phases()
        decode, prefill = phases.get("decode_seconds"), phases.get("prefill_seconds")
        for phase in ("queue", "prefill", "decode"):
            seconds = phases.get(f"{phase}_seconds")
            if seconds is not None:
                metrics.histogram(f"request_{phase}_time_seconds").observe(seconds)
        if decode is not None and prefill is not None:
            metrics.histogram("request_inference_time_seconds").observe(prefill + decode)
        if decode is not None and self._longest > 1:
            gap = decode / (self._longest - 1)
            metrics.histogram("request_time_per_output_token_seconds").observe(gap)
            if self._num_outputs == 1:
                self._between.observe(gap, self._longest - 1)


def between(start: float | None, end: float | None) -> float | None:
    """Seconds from `start` to `end`, at least 0 since two processes' clocks may differ; None when either is unknown."""
    return None if start is None or end is None else max(end - start, 0.0)
