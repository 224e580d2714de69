"""Counts and latencies of requests, which all API processes of a server count together.

Knows no route and no exporter: plugins turn the counts into metrics.
"""

from __future__ import annotations

from itertools import accumulate

from ..interfaces.serving import Histogram, RequestCounts
from .tallies import Distribution, Tallies

#: Most tokens in a batch, and most seconds that a batch waits while tokens arrive.
_MAX_GAPS = 1024
_MAX_SECONDS = 0.25
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_PHASE = (0.001, 0.005, 0.02, 0.1, *_WHOLE[1:])
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
_OUTPUTS = (1.0, 2.0, 5.0, 10.0, 20.0)

_COUNTERS = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")
_HISTOGRAMS = {
    "time_to_first_token_seconds": _FIRST_TOKEN,
    "inter_token_latency_seconds": _BETWEEN_TOKENS,
    "request_time_per_output_token_seconds": _BETWEEN_TOKENS,
    "e2e_request_latency_seconds": _WHOLE,
    "request_queue_time_seconds": _PHASE,
    "request_prefill_time_seconds": _PHASE,
    "request_decode_time_seconds": _PHASE,
    "request_inference_time_seconds": _PHASE,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_params_max_tokens": _TOKENS,
    "request_params_n": _OUTPUTS,
}
_REASONS = ("stop", "length", "abort", "error")
_STATUSES = ("2xx", "3xx", "4xx", "5xx")
#: Where the counts of ends, of responses and of histograms begin among the cells.
_ENDS = len(_COUNTERS)
_RESPONSES = _ENDS + len(_REASONS)
_FIRST_HISTOGRAM = _RESPONSES + len(_STATUSES)


class ServerMetrics:
    """What the API processes that share `file`, the descriptor of a file in memory, count together."""

    def __init__(self, file: int | None = None) -> None:
        sizes = [Distribution.size(bounds) for bounds in _HISTOGRAMS.values()]
        *self._starts, self._in_flight = accumulate(sizes, initial=_FIRST_HISTOGRAM)
        self._tallies = Tallies(self._in_flight + 1, 1, file)
        self.cells = self._tallies.cells
        self._histograms = {
            name: Distribution(self.cells, start, bounds)
            for (name, bounds), start in zip(_HISTOGRAMS.items(), self._starts, strict=True)
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
        self.cells[_ENDS + _REASONS.index(reason)] += 1

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
            self.cells[_RESPONSES + status // 100 - 2] += 1

    @property
    def in_flight(self) -> int:
        """HTTP requests that are being answered, in all API processes."""
        return int(self._tallies.total()[self._in_flight])

    def counts(self) -> RequestCounts:
        """The sums over all API processes."""
        self.pace.count()
        total = self._tallies.total()
        return RequestCounts(
            counters=dict(zip(_COUNTERS, total, strict=False)),
            ends=dict(zip(_REASONS, total[_ENDS:], strict=False)),
            responses=dict(zip(_STATUSES, total[_RESPONSES:], strict=False)),
            histograms={
                name: Histogram(bounds, total[start : start + len(bounds) + 1], total[start + len(bounds) + 1])
                for (name, bounds), start in zip(_HISTOGRAMS.items(), self._starts, strict=True)
            },
            in_flight=int(total[self._in_flight]),
        )


class TokenPace:
    """Counts new tokens and the times between them in batches: each one alone would cost as much as its text.

    Gathers for all requests of a process; `cells[index]` counts tokens, `between` takes the times.
    """

    def __init__(self, cells: memoryview[float], index: int, between: Distribution) -> None:
        self._cells = cells
        self._index = index
        self._between = between
        self._num_tokens = 0
        self._gaps: list[float] = []
        self._weights: list[int] = []
        self._counted = 0.0

    def begin(self, num_tokens: int) -> None:
        """Takes the first tokens of a request."""
        self._num_tokens += num_tokens

    def add(self, num_tokens: int, gap: float, weight: int, now: float) -> None:
        """Takes further ones, `weight` of which came `gap` seconds one after the other."""
        self._num_tokens += num_tokens
        self._gaps.append(gap)
        self._weights.append(weight)
        if len(self._gaps) >= _MAX_GAPS or now - self._counted > _MAX_SECONDS:
            self._counted = now
            self.count()

    def count(self) -> None:
        """Adds the batch to the metrics; called before they are read, and at the end of each request."""
        self._cells[self._index] += self._num_tokens
        self._num_tokens = 0
        if self._gaps:
            self._between.observe_all(self._gaps, self._weights)
            self._gaps.clear()
            self._weights.clear()
