"""What the server counts, in the Prometheus text format, with a registry of its own.

Latencies are taken where the client's bytes leave; the engine's counters are read when somebody asks. Knows no route.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..interfaces.engine import EngineStats

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

#: name, help, field of EngineStats
_GAUGES = (
    ("frame:num_requests_running", "Requests that the engine computes.", "running"),
    ("frame:num_requests_waiting", "Requests that wait in the engine.", "waiting"),
    ("frame:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "kv_usage"),
    ("frame:kv_cache_blocks", "Blocks of the KV cache.", "num_blocks"),
    ("frame:step_seconds", "Duration of the newest step.", "step_seconds"),
)
_COUNTERS = (
    ("frame:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("frame:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("frame:num_preemptions", "Requests that gave way and were computed again.", "preemptions"),
    ("frame:engine_steps", "Steps that the engine has run.", "steps"),
)


class _EngineCollector:
    """Turns the newest `EngineStats` into metrics."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats = EngineStats()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each exposition."""
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], getattr(self.stats, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(self.stats, field))
            yield counter


class ServerMetrics:
    """Counters and histograms of one API process."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        label = ["model_name"]
        finished = Counter(
            "frame:request_success", "Requests by how they ended.", [*label, "finished_reason"], registry=self._registry
        )
        self._finished = {
            reason: finished.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")
        }

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, label, registry=self._registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, label, buckets=buckets, registry=self._registry).labels(model_name)

        self.prompt_tokens = counter("frame:prompt_tokens", "Prompt tokens taken in.")
        self.generation_tokens = counter("frame:generation_tokens", "Tokens generated.")
        self.first_token = histogram("frame:time_to_first_token_seconds", "Until the first token.", _FIRST_TOKEN)
        self.between_tokens = histogram(
            "frame:inter_token_latency_seconds", "Between two outputs of a request.", _BETWEEN_TOKENS
        )
        self.whole = histogram("frame:e2e_request_latency_seconds", "Whole requests.", _WHOLE)

    def finished(self, reason: str) -> None:
        """Counts a request's end."""
        self._finished[reason].inc()

    def exposition(self, stats: EngineStats) -> bytes:
        """Everything in the text format."""
        self._engine.stats = stats
        return generate_latest(self._registry)


class RequestTimer:
    """Observes one request from its arrival to its end."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._start = self._last = time.perf_counter()
        self._tokens = 0
        self._reason = "abort"

    def tokens(self, count: int) -> None:
        """Notes that `count` tokens arrived now."""
        now = time.perf_counter()
        if self._tokens == 0:
            self._metrics.first_token.observe(now - self._start)
        else:
            self._metrics.between_tokens.observe(now - self._last)
        self._last = now
        self._tokens += count

    def ends(self, reason: str) -> None:
        """Notes how the request ended; without it, it was aborted."""
        self._reason = reason

    def close(self) -> None:
        """Counts what was observed."""
        self._metrics.generation_tokens.inc(self._tokens)
        self._metrics.whole.observe(time.perf_counter() - self._start)
        self._metrics.finished(self._reason)
