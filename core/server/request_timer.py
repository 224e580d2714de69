"""Observes one generation from its arrival to its end. Knows no route and no text."""

from __future__ import annotations

import time
from typing import Any

from .metrics import ServerMetrics


class RequestTimer:
    """Feeds the server's metrics; made when a request arrives and closed however it ends."""

    def __init__(self, metrics: ServerMetrics, params: Any) -> None:
        self._metrics = metrics
        self._params = params
        self._first = metrics.histogram("time_to_first_token_seconds")
        self._between = metrics.histogram("inter_token_latency_seconds")
        self._arrival = self._start = self._last = time.perf_counter()
        self._tokens = 0
        self._longest = 0
        self._prompt_tokens: int | None = None
        self._queue_seconds: float | None = None
        self._cached_tokens = 0
        self._total_seconds = 0.0
        self.reason = "abort"

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """Notes the prompt, when the first output is there."""
        self._prompt_tokens, self._cached_tokens = num_tokens, num_cached
        self._metrics.prompt(num_tokens, num_cached)

    def queued(self, seconds: float) -> None:
        """Notes how long the request waited for its first step."""
        self._queue_seconds = max(seconds, 0.0)

    def tokens(self, total: int, longest: int) -> None:
        """Notes that `total` tokens arrived now, at most `longest` of one output."""
        now = time.perf_counter()
        if self._tokens == 0:
            self._first.observe(now - self._arrival)
            self._start = now
        else:
            self._between.observe((now - self._last) / longest, longest)
        self._last = now
        self._tokens += total
        self._longest += longest
        self._metrics.generated(total)

    def ends(self, reason: str) -> None:
        """Notes how the request ended; without it, it was aborted."""
        self.reason = reason

    def close(self) -> None:
        """Counts what was observed."""
        metrics = self._metrics
        self._total_seconds = time.perf_counter() - self._arrival
        metrics.finished(self.reason)
        metrics.histogram("e2e_request_latency_seconds").observe(self._total_seconds)
        metrics.histogram("request_params_n").observe(self._params.n)
        if self._params.max_tokens is not None:
            metrics.histogram("request_params_max_tokens").observe(self._params.max_tokens)
        if self._prompt_tokens is not None:
            metrics.histogram("request_prompt_tokens").observe(self._prompt_tokens)
            metrics.histogram("request_generation_tokens").observe(self._tokens)
        if self._tokens:
            self._close_phases()

    def figures(self) -> dict[str, Any]:
        """Tokens and seconds of a closed request, as `RequestReport` names them."""
        figures: dict[str, Any] = {
            "total_seconds": self._total_seconds,
            "prompt_tokens": self._prompt_tokens or 0,
            "cached_tokens": self._cached_tokens,
            "generated_tokens": self._tokens,
            "queue_seconds": self._queue_seconds,
        }
        if self._tokens:
            figures["first_token_seconds"] = self._start - self._arrival
            figures["decode_seconds"] = self._last - self._start
            if self._queue_seconds is not None:
                figures["prefill_seconds"] = max(self._start - self._arrival - self._queue_seconds, 0.0)
        return figures

    def _close_phases(self) -> None:
        metrics, decode = self._metrics, self._last - self._start
        metrics.histogram("request_decode_time_seconds").observe(decode)
        if self._longest > 1:
            metrics.histogram("request_time_per_output_token_seconds").observe(decode / (self._longest - 1))
        if self._queue_seconds is not None:
            prefill = max(self._start - self._arrival - self._queue_seconds, 0.0)
            metrics.histogram("request_queue_time_seconds").observe(self._queue_seconds)
            metrics.histogram("request_prefill_time_seconds").observe(prefill)
            metrics.histogram("request_inference_time_seconds").observe(prefill + decode)
