"""The typed metrics of `LLM.get_metrics`. Knows no exporter: the HTTP server has its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import get_args

from frame.core.front.outputs import RequestMetrics
from frame.core.interfaces.engine import EngineStats, FinishReason
from frame.transfers.measures import GAUGES, by_tier

FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class Metric:
    """One metric at one moment. Times are in seconds."""

    name: str
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)


@dataclass
class Counter(Metric):
    """A metric that only grows."""

    value: float


@dataclass
class Gauge(Metric):
    """A metric that goes up and down."""

    value: float


@dataclass
class Vector(Metric):
    """Several counters under one name, in a fixed order."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """`buckets` maps an upper bound, as text, to the number of observations up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


class _Distribution:
    """Counts observations by upper bounds."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self, name: str) -> Histogram:
        bounds = [*map(str, self._bounds), "+Inf"]
        buckets = dict(zip(bounds, accumulate(self._counts), strict=True))
        return Histogram(name, sum(self._counts), self._sum, buckets)


class RequestStatistics:
    """Histograms over finished requests, and the numbers of requests by finish reason."""

    def __init__(self) -> None:
        self._first_token = _Distribution()
        self._per_token = _Distribution()
        self._whole = _Distribution()
        self._finished = dict.fromkeys(FINISH_REASONS, 0)

    def observe(self, metrics: RequestMetrics, ends: Sequence[tuple[str, int]]) -> None:
        """Counts a finished request by its times and the (finish reason, number of tokens) of each of its outputs."""
        if metrics.finished_time is not None:
            self._whole.observe(metrics.finished_time - metrics.arrival_time)
        if metrics.first_token_time is not None and metrics.last_token_time is not None:
            self._first_token.observe(metrics.first_token_time - metrics.arrival_time)
            longest = max(num_tokens for _, num_tokens in ends)
            if longest > 1:
                self._per_token.observe((metrics.last_token_time - metrics.first_token_time) / (longest - 1))
        for reason, _ in ends:
            self._finished[reason] += 1

    def snapshot(self, stats: EngineStats) -> list[Metric]:
        """The present value of every metric; `stats` are the engine's own counters."""
        return [
            Gauge("frame_num_requests_running", stats.running),
            Gauge("frame_num_requests_waiting", stats.waiting),
            Gauge("frame_kv_cache_usage_perc", stats.kv_usage),
            Counter("frame_prefix_cache_queries", stats.prefix_queries),
            Counter("frame_prefix_cache_hits", stats.prefix_hits),
            Counter("frame_num_preemptions", stats.preemptions),
            Counter("frame_prompt_tokens", stats.prompt_tokens),
            Counter("frame_generation_tokens", stats.generated_tokens),
            Counter("frame_kv_events", stats.num_kv_events),
            Counter("frame_kv_events_dropped", stats.num_kv_events_dropped),
            Counter("frame_spec_decode_num_drafts", stats.num_drafts),
            Counter("frame_spec_decode_num_draft_tokens", stats.num_draft_tokens),
            Counter("frame_spec_decode_num_accepted_tokens", stats.num_accepted_tokens),
            Gauge("frame_expert_balancedness", stats.expert_balancedness),
            Counter("frame_expert_placements", stats.num_expert_placements),
            Counter("frame_expert_copies", stats.num_expert_copies),
            *(Counter(f"frame_kv_connector_{name}", value) for name, value in stats.connector_counters.items()),
            *(Gauge(f"frame_kv_connector_{name}", value) for name, value in stats.connector_gauges.items()),
            *_of_tiers(stats),
            Vector("frame_spec_decode_num_accepted_tokens_per_pos", list(stats.num_accepted_per_place)),
            *(
                Counter("frame_request_success", count, labels={"finished_reason": reason})
                for reason, count in self._finished.items()
            ),
            # in the order of FINISH_REASONS
            Vector("frame_requests_by_finish_reason", list(self._finished.values())),
            self._first_token.snapshot("frame_time_to_first_token_seconds"),
            self._per_token.snapshot("frame_time_per_output_token_seconds"),
            self._whole.snapshot("frame_e2e_request_latency_seconds"),
        ]


def _of_tiers(stats: EngineStats) -> Iterator[Metric]:
    """What connectors report under names that say what it is, with the connector and the tier in labels."""
    for (connector, tier), values in by_tier(stats).items():
        for (what, direction), value in values.items():
            labels = {"connector": connector, "tier": tier} | ({"direction": direction} if direction else {})
            yield (Gauge if what in GAUGES else Counter)(f"frame_kv_tier_{what}", value, labels=labels)
