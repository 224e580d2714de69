"""The server's metrics in the Prometheus text format, with a registry of its own.

Latencies are measured where answers are sent; the engine's counters are read at each scrape. Metrics are named
`frame_…`; an option adds them a second time under vLLM's names. Knows no route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..interfaces.client import EngineInfo
from ..interfaces.engine import EngineStats
from .tallies import Distribution, Tallies
from .token_pace import TokenPace

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_PHASE = (0.001, 0.005, 0.02, 0.1, *_WHOLE[1:])
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
_OUTPUTS = (1.0, 2.0, 5.0, 10.0, 20.0)

#: name, help, field of EngineStats
_ENGINE_GAUGES = (
    ("num_requests_running", "Running requests in the engine.", "running"),
    ("num_requests_waiting", "Waiting requests in the engine.", "waiting"),
    ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "kv_usage"),
    ("kv_cache_blocks", "Blocks of the KV cache.", "num_blocks"),
    ("step_seconds", "Duration of the newest step.", "step_seconds"),
)
_ENGINE_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("num_preemptions", "Preemptions: requests that gave back their blocks and were computed again.", "preemptions"),
    ("engine_steps", "Steps that the engine has run.", "steps"),
    ("engine_busy_seconds", "Seconds that the engine spent in steps.", "busy_seconds"),
    ("spec_decode_num_drafts", "Steps of a request in which drafts were checked.", "num_drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens that were checked.", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", "num_accepted_tokens"),
)
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests."),
    ("prompt_tokens_cached", "Prompt tokens that were found in the KV cache."),
    ("generation_tokens", "Tokens generated."),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN),
    ("inter_token_latency_seconds", "Between two tokens of a request.", _BETWEEN_TOKENS),
    ("request_time_per_output_token_seconds", "Mean time between a request's tokens.", _BETWEEN_TOKENS),
    ("e2e_request_latency_seconds", "Whole requests.", _WHOLE),
    ("request_queue_time_seconds", "From arrival to the first step.", _PHASE),
    ("request_prefill_time_seconds", "From the first step to the first token.", _PHASE),
    ("request_decode_time_seconds", "From the first to the last token.", _PHASE),
    ("request_inference_time_seconds", "From the first step to the last token.", _PHASE),
    ("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    ("request_generation_tokens", "Tokens generated for a request.", _TOKENS),
    ("request_params_max_tokens", "max_tokens of a request.", _TOKENS),
    ("request_params_n", "n of a request.", _OUTPUTS),
)
REASONS = ("stop", "length", "abort", "error")
_CLASSES = ("2xx", "3xx", "4xx", "5xx")
#: Names that older dashboards for vLLM use: theirs → ours.
_FORMER = {
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "request_max_num_generation_tokens": "request_generation_tokens",
}
#: Metrics without a counterpart there.
_OWN = frozenset(("kv_cache_blocks", "step_seconds", "engine_steps", "engine_busy_seconds", "requests_in_flight"))


class ServerMetrics:
    """Counters and histograms of all API processes that share `file`, the descriptor of a file in memory.

    `model_name` is the label that every metric carries; `vllm_names` adds the second names.
    """

    def __init__(self, model_name: str, *, vllm_names: bool = False, file: int | None = None) -> None:
        self._model_name = model_name
        self._vllm_names = vllm_names
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(self))
        self._stats = EngineStats()
        self._info: EngineInfo | None = None
        num_counts = len(_COUNTERS) + len(REASONS) + len(_CLASSES)
        sizes = [Distribution.size(bounds) for _, _, bounds in _HISTOGRAMS]
        self._starts = list(accumulate(sizes, initial=num_counts))
        self._in_flight = self._starts.pop()
        self._tallies = Tallies(self._in_flight + 1, 1, file)
        self.cells = self._tallies.cells
        self._histograms = {
            name: Distribution(self.cells, start, bounds)
            for (name, _, bounds), start in zip(_HISTOGRAMS, self._starts, strict=True)
        }
        self.pace = TokenPace(self.cells, 2, self.histogram("inter_token_latency_seconds"))

    def histogram(self, name: str) -> Distribution:
        """The histogram called `name`."""
        return self._histograms[name]

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """Counts a prompt."""
        self.cells[0] += num_tokens
        self.cells[1] += num_cached

    def finished(self, reason: str) -> None:
        """Counts a request's end."""
        self.cells[len(_COUNTERS) + REASONS.index(reason)] += 1

    def entered(self) -> None:
        """Counts an admitted HTTP request."""
        self.cells[self._in_flight] += 1

    def left(self, status: int) -> None:
        """Counts the answer to an admitted HTTP request; `status` is 0 when it had none."""
        self.cells[self._in_flight] -= 1
        self.responded(status)

    def responded(self, status: int) -> None:
        """Counts an HTTP response."""
        if 200 <= status < 600:
            self.cells[len(_COUNTERS) + len(REASONS) + status // 100 - 2] += 1

    @property
    def in_flight(self) -> int:
        """HTTP requests that are being answered, in all API processes."""
        return int(self._tallies.total()[self._in_flight])

    def exposition(
        self,
        stats: EngineStats,
        info: EngineInfo | None = None,
        encode: Callable[[CollectorRegistry], bytes] = generate_latest,
    ) -> bytes:
        """Everything in the Prometheus text format, or as `encode` writes it."""
        self._stats, self._info = stats, info
        return encode(self._registry)

    def families(self) -> Iterator[Metric]:
        """Every metric now, under one name or both."""
        self.pace.count()
        own = {family.name: family for family in self._own()}
        for name, family in (own | {family.name: family for family in self._of_connector()}).items():
            yield _named(family, f"frame_{name}")
        if self._vllm_names:
            theirs = {name: name for name in own if name not in _OWN} | _FORMER
            for name, ours in theirs.items():
                yield _named(own[ours], f"vllm:{name}")

    def _own(self) -> Iterator[Metric]:
        yield from self._of_engine()
        total = self._tallies.total()
        model, label = [self._model_name], ["model_name"]
        for index, (name, text) in enumerate(_COUNTERS):
            counter = CounterMetricFamily(name, text, labels=label)
            counter.add_metric(model, total[index])
            yield counter
        ends = CounterMetricFamily("request_success", "Requests by how they ended.", labels=[*label, "finished_reason"])
        for index, reason in enumerate(REASONS, len(_COUNTERS)):
            ends.add_metric([*model, reason], total[index])
        yield ends
        answers = CounterMetricFamily("http_responses", "HTTP responses by class of status.", labels=[*label, "status"])
        for index, status in enumerate(_CLASSES, len(_COUNTERS) + len(REASONS)):
            answers.add_metric([*model, status], total[index])
        yield answers
        for (name, text, bounds), start in zip(_HISTOGRAMS, self._starts, strict=True):
            yield _histogram(name, text, self._model_name, bounds, total[start : start + Distribution.size(bounds)])
        load = GaugeMetricFamily("requests_in_flight", "HTTP requests that are being answered.", labels=label)
        load.add_metric(model, total[self._in_flight])
        yield load

    def _of_engine(self) -> Iterator[Metric]:
        labels, names = [self._model_name, "0"], ["model_name", "engine"]
        for name, text, field in _ENGINE_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(labels, getattr(self._stats, field))
            yield gauge
        for name, text, field in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(labels, getattr(self._stats, field))
            yield counter
        places = CounterMetricFamily(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by position.",
            labels=[*names, "position"],
        )
        for place, count in enumerate(self._stats.num_accepted_per_place):
            places.add_metric([*labels, str(place)], count)
        yield places
        if self._info is not None:
            info = self._info
            facts = {"block_size": info.block_size, "num_gpu_blocks": info.num_blocks, "cache_dtype": info.dtype}
            config = GaugeMetricFamily("cache_config_info", "Facts of the KV cache.", labels=[*names, *facts])
            config.add_metric([*labels, *map(str, facts.values())], 1)
            yield config

    def _of_connector(self) -> Iterator[Metric]:
        """The values that the workers of the KV connector reported."""
        labels, text = {"model_name": self._model_name, "engine": "0"}, "Reported by the KV connector."
        for kind, numbers in (("gauge", self._stats.connector_gauges), ("counter", self._stats.connector_counters)):
            for name, value in numbers.items():
                family = Metric(f"kv_connector_{name.removesuffix('_total')}", text, kind)
                family.add_sample(family.name + "_total" * (kind == "counter"), labels, value)
                yield family


class _Collector:
    """The collector that prometheus_client calls at each scrape."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering reads no counters."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric now."""
        return self._metrics.families()


def _histogram(
    name: str, text: str, model_name: str, bounds: tuple[float, ...], cells: list[float]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["model_name"])
    names = [*map(str, map(float, bounds)), "+Inf"]
    family.add_metric([model_name], list(zip(names, accumulate(cells[:-1]), strict=True)), cells[-1])
    return family


def _named(family: Metric, name: str) -> Metric:
    """The same samples under another name."""
    copy = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        copy.add_sample(name + sample.name.removeprefix(family.name), sample.labels, sample.value)
    return copy
