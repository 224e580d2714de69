"""`/metrics` of a front, from what its servers have counted; nothing is done for it while requests are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .fleet import HEAD_BOUNDS, Fleet, FleetServer

_GAUGES = (
    ("ready", "1 for a server that gets requests.", lambda server: int(server.usable)),
    (
        "draining",
        "1 for a server that is to get no new requests.",
        lambda server: int(server.state.startswith("drain")),
    ),
    ("requests_in_flight", "Requests of this front that the server has under way.", lambda server: server.in_flight),
    ("other_requests", "Requests that the server has from others, as it reports.", lambda server: server.num_other),
)
_COUNTERS = (
    ("failures", "Requests that got no answer from the server.", lambda server: server.failures),
    ("broken_answers", "Answers of the server that broke off.", lambda server: server.broken),
    ("prefills", "Prompts that the server computed for others.", lambda server: server.prefills),
    (
        "prefills_without_kv",
        "Those of them whose KV the server did not hand over, so that they were computed twice.",
        lambda server: server.prefills_without_kv,
    ),
)


class FleetCollector(Collector):
    """The metrics of `fleet`, of what the front refused itself, by status, and of what the policy counts, by name."""

    def __init__(self, fleet: Fleet, refused: Counter[int], figures: Callable[[], Mapping[str, float]] = dict) -> None:
        self._fleet = fleet
        self._refused = refused
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        servers = self._fleet.servers
        for name, about, value in _GAUGES:
            gauge = GaugeMetricFamily(f"frame_route_{name}", about, labels=["server"])
            for server in servers:
                gauge.add_metric([server.url], value(server))
            yield gauge
        for name, about, value in _COUNTERS:
            counter = CounterMetricFamily(f"frame_route_{name}", about, labels=["server"])
            for server in servers:
                counter.add_metric([server.url], value(server))
            yield counter
        answers = CounterMetricFamily("frame_route_answers", "Answers of servers.", labels=["server", "status"])
        heads = HistogramMetricFamily(
            "frame_route_head_seconds", "Seconds until the server's answer began.", labels=["server"]
        )
        for server in servers:
            for place, count in enumerate(server.answers):
                answers.add_metric([server.url, f"{place + 1}xx"], count)
            heads.add_metric([server.url], _buckets(server), sum_value=server.head_seconds)
        yield answers
        yield heads
        refused = CounterMetricFamily("frame_route_refused", "Requests that the front refused.", labels=["status"])
        for status, count in sorted(self._refused.items()):
            refused.add_metric([str(status)], count)
        yield refused
        policy = GaugeMetricFamily("frame_route_policy", "What the route policy has counted.", labels=["figure"])
        for name, figure in self._figures().items():
            policy.add_metric([name], figure)
        yield policy


def _buckets(server: FleetServer) -> list[tuple[str, float]]:
    total, found = 0, []
    for bound, count in zip([*map(str, HEAD_BOUNDS), "+Inf"], server.head_counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found
