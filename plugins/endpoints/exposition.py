"""The metrics of a server in the formats of Prometheus.

They are named `frame_…`; a setting adds those that vLLM has too a second time, under vLLM's names. Knows no route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from frame.interfaces import EngineInfo, EngineStats, Histogram, RequestCounts
from frame.transfers.measures import by_tier

#: (name, help, field of `EngineStats`)
_ENGINE_GAUGES = (
    ("num_requests_running", "Running requests in the engine.", "running"),
    ("num_requests_waiting", "Waiting requests in the engine.", "waiting"),
    ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "kv_usage"),
    ("kv_cache_blocks", "Blocks of the KV cache.", "num_blocks"),
    ("step_seconds", "Duration of the newest step.", "step_seconds"),
    (
        "expert_balancedness",
        "Mean tokens of a device over those of the fullest, before experts were placed last; 1 without expert balance.",
        "expert_balancedness",
    ),
)
_ENGINE_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("num_preemptions", "Preemptions: requests that gave back their blocks and were computed again.", "preemptions"),
    ("engine_steps", "Steps that the engine has run.", "steps"),
    ("engine_busy_seconds", "Seconds that the engine spent in steps.", "busy_seconds"),
    ("kv_events", "KV events that were accepted for subscribers.", "num_kv_events"),
    ("kv_events_dropped", "KV events that were dropped, since too many waited.", "num_kv_events_dropped"),
    ("expert_placements", "Placements that moved experts, of all engines that share them.", "num_expert_placements"),
    ("expert_copies", "Experts that went from one device to another, one layer each.", "num_expert_copies"),
    ("spec_decode_num_drafts", "Steps of a request in which drafts were checked.", "num_drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens that were checked.", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", "num_accepted_tokens"),
)
#: Helps of what the API processes count, by name.
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests.",
    "prompt_tokens_cached": "Prompt tokens that were found in the KV cache.",
    "generation_tokens": "Tokens generated.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "request_time_per_output_token_seconds": "Mean time between a request's tokens.",
    "e2e_request_latency_seconds": "Whole requests.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first to the last token.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_params_n": "n of a request.",
}
#: What is measured of the tiers of KV connectors: (name, help, type). `direction` is a label where a measure has one.
_TIERS = (
    ("lookup_tokens", "Prompt tokens that the device did not hold and the connector was asked for.", "counter"),
    ("hit_tokens", "Those of them that it had.", "counter"),
    ("bytes", "Bytes of KV blocks that were moved, of all workers.", "counter"),
    ("seconds", "Seconds that the first worker took for its part.", "counter"),
    ("blocks", "KV blocks that were moved.", "counter"),
    ("failed_blocks", "KV blocks that could not be moved.", "counter"),
    ("used_bytes", "Bytes of the tier that hold blocks.", "gauge"),
    ("size_bytes", "Bytes that the tier may hold.", "gauge"),
    ("held_blocks", "Blocks of ended requests that are kept for other engines.", "gauge"),
)
#: Names that older dashboards for vLLM use: vLLM's name → ours.
_FORMER = {
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "request_max_num_generation_tokens": "request_generation_tokens",
}
#: Metrics of frame that vLLM does not have.
_OWN = frozenset(
    (
        "engine_up",
        "kv_cache_blocks",
        "step_seconds",
        "engine_steps",
        "engine_busy_seconds",
        "requests_in_flight",
        "kv_events",
        "kv_events_dropped",
        "expert_balancedness",
        "expert_placements",
        "expert_copies",
    )
)


@dataclass(frozen=True)
class Exposition:
    """The metrics at one moment, as a collector of prometheus_client.

    `model_name` is the label that every metric carries; `vllm_names` adds the second names.
    """

    model_name: str
    counts: RequestCounts
    stats: EngineStats
    info: EngineInfo | None = None
    vllm_names: bool = False

    def encoded(self, encode: Callable[[Any], bytes] = generate_latest) -> bytes:
        """Everything in the Prometheus text format, or as `encode` writes it."""
        return encode(self)

    def collect(self) -> Iterator[Metric]:
        """Every metric, under one name or both."""
        own = {family.name: family for family in (*self._of_engine(), *self._of_requests())}
        further = {family.name: family for family in (*self._of_connector(), *self._of_tiers(), *self._of_adapters())}
        for name, family in (own | further).items():
            yield _named(family, f"frame_{name}")
        if self.vllm_names:
            theirs = {name: name for name in own if name not in _OWN} | _FORMER
            for name, ours in theirs.items():
                yield _named(own[ours], f"vllm:{name}")

    def _of_requests(self) -> Iterator[Metric]:
        """What the API processes counted."""
        model, label, counts = [self.model_name], ["model_name"], self.counts
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=label)
            counter.add_metric(model, counts.counters[name])
            yield counter
        yield self._by_label("request_success", "Requests by how they ended.", "finished_reason", counts.ends)
        yield self._by_label("http_responses", "HTTP responses by class of status.", "status", counts.responses)
        for name, text in _HISTOGRAMS.items():
            yield _histogram(name, text, self.model_name, counts.histograms[name])
        load = GaugeMetricFamily("requests_in_flight", "HTTP requests that are being answered.", labels=label)
        load.add_metric(model, counts.in_flight)
        yield load

    def _by_label(self, name: str, text: str, label: str, numbers: Mapping[str, float]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["model_name", label])
        for value, number in numbers.items():
            counter.add_metric([self.model_name, value], number)
        return counter

    def _by_engine(self) -> Iterator[tuple[list[str], EngineStats]]:
        """The labels and the statistics of each engine."""
        for stats in self.stats.ranks or [self.stats]:
            yield [self.model_name, str(stats.rank)], stats

    def _of_engine(self) -> Iterator[Metric]:
        names = ["model_name", "engine"]
        for name, text, field in _ENGINE_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=names)
            for labels, stats in self._by_engine():
                gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        for name, text, field in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=names)
            for labels, stats in self._by_engine():
                counter.add_metric(labels, getattr(stats, field))
            yield counter
        up = GaugeMetricFamily("engine_up", "1 while the engine serves, else 0.", labels=names)
        places = CounterMetricFamily(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by position.",
            labels=[*names, "position"],
        )
        for labels, stats in self._by_engine():
            up.add_metric(labels, stats.problem is None)
            for place, count in enumerate(stats.num_accepted_per_place):
                places.add_metric([*labels, str(place)], count)
        yield up
        yield places
        if self.info is not None:
            yield self._of_cache(self.info, names)

    def _of_cache(self, info: EngineInfo, names: list[str]) -> Metric:
        facts = "block_size", "num_gpu_blocks", "cache_dtype"
        config = GaugeMetricFamily("cache_config_info", "Facts of the KV cache.", labels=[*names, *facts])
        for labels, stats in self._by_engine():
            num_blocks = stats.num_blocks if self.stats.ranks else info.num_blocks
            config.add_metric([*labels, str(info.block_size), str(num_blocks), info.dtype], 1)
        return config

    def _of_connector(self) -> Iterator[Metric]:
        """The values that the workers of the KV connectors reported."""
        families: dict[str, Metric] = {}
        for (model, engine), stats in self._by_engine():
            labels = {"model_name": model, "engine": engine}
            for kind, numbers in (("gauge", stats.connector_gauges), ("counter", stats.connector_counters)):
                for key, value in numbers.items():
                    name = f"kv_connector_{key.removesuffix('_total')}"
                    family = families.setdefault(name, Metric(name, "Reported by the KV connector.", kind))
                    family.add_sample(name + "_total" * (kind == "counter"), labels, value)
        yield from families.values()

    def _of_tiers(self) -> Iterator[Metric]:
        """The same values where their names say what is measured, with the connector and the tier in labels."""
        families = {what: Metric(f"kv_tier_{what}", text, kind) for what, text, kind in _TIERS}
        for (model, engine), stats in self._by_engine():
            for (connector, tier), values in by_tier(stats).items():
                for (what, direction), value in values.items():
                    labels = {"model_name": model, "engine": engine, "connector": connector, "tier": tier}
                    family = families[what]
                    labels |= {"direction": direction} if direction else {}
                    family.add_sample(family.name + "_total" * (family.type == "counter"), labels, value)
        yield from (family for family in families.values() if family.samples)

    def _of_adapters(self) -> Iterator[Metric]:
        """The requests of each adapter, where some are loaded."""
        kinds = (
            ("adapter_requests_running", "Requests with the adapter that run.", "gauge", "adapters_running"),
            ("adapter_requests_waiting", "Requests with the adapter that wait.", "gauge", "adapters_waiting"),
            ("adapter_requests", "Requests with the adapter since it was loaded.", "counter", "adapters_added"),
        )
        for name, text, kind, field in kinds:
            family = Metric(name, text, kind)
            for (model, engine), stats in self._by_engine():
                counts = getattr(stats, field)
                for adapter in stats.adapters_added:
                    labels = {"model_name": model, "engine": engine, "adapter": adapter}
                    family.add_sample(name + "_total" * (kind == "counter"), labels, counts.get(adapter, 0))
            if family.samples:
                yield family


def _histogram(name: str, text: str, model_name: str, histogram: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["model_name"])
    names = [*map(str, map(float, histogram.bounds)), "+Inf"]
    family.add_metric([model_name], list(zip(names, accumulate(histogram.counts), strict=True)), histogram.sum)
    return family


def _named(family: Metric, name: str) -> Metric:
    """A metric with the samples of `family` under another name."""
    copy = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        copy.add_sample(name + sample.name.removeprefix(family.name), sample.labels, sample.value)
    return copy
