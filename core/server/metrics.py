"""Counts and latencies of requests, which all API processes of a server count together.

Each process owns a row of float64 cells in a file in memory that their parent opened, so that counting is a plain
addition. A process that takes the row of a dead one continues its counts. Knows no route and no exporter: plugins turn
the counts into metrics.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ..interfaces.serving import Histogram, RequestCounts

#: Most processes that share a file.
MAX_ROWS = 256
_CELL_BYTES = 8
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
#: Name of a count -> its cell; the histograms come behind these cells.
_CELLS = {name: index for index, name in enumerate((*_COUNTERS, *_REASONS, *_STATUSES))}


class ServerMetrics:
    """What the API processes that share `file`, the descriptor of a file in memory, count together.

    Without a file this process counts alone. Raises `OSError` when every row of the file is taken.
    """

    def __init__(self, file: int | None = None) -> None:
        *self._starts, self._in_flight = accumulate(
            (len(bounds) + 2 for bounds in _HISTOGRAMS.values()), initial=len(_CELLS)
        )
        size = self._size = self._in_flight + 1
        self._memory: bytearray | mmap.mmap = bytearray(size * _CELL_BYTES)
        row = 0
        if file is not None:
            row = _claim_row(file)
            if os.fstat(file).st_size < MAX_ROWS * size * _CELL_BYTES:
                os.ftruncate(file, MAX_ROWS * size * _CELL_BYTES)
            self._memory = mmap.mmap(file, MAX_ROWS * size * _CELL_BYTES)
        self.cells: memoryview[float] = memoryview(self._memory).cast("d")[row * size : (row + 1) * size]
        self.cells[self._in_flight] = 0.0
        self._histograms = {
            name: Distribution(self.cells, start, bounds)
            for (name, bounds), start in zip(_HISTOGRAMS.items(), self._starts, strict=True)
        }
        self.pace = TokenPace(self.cells, _CELLS["generation_tokens"], self._histograms["inter_token_latency_seconds"])

    def observe(self, name: str, value: float | None, weight: int = 1) -> None:
        """Counts `value` in the histogram called `name`, `weight` times; None is not counted."""
        if value is not None:
            self._histograms[name].observe(value, weight)

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """Counts a prompt."""
        self.cells[_CELLS["prompt_tokens"]] += num_tokens
        self.cells[_CELLS["prompt_tokens_cached"]] += num_cached

    def finished(self, reason: str) -> None:
        """Counts a request's end."""
        self.cells[_CELLS[reason]] += 1

    def entered(self) -> None:
        """Counts an admitted HTTP request that needs the engine."""
        self.cells[self._in_flight] += 1

    def left(self, status: int) -> None:
        """Counts the answer to such a request; `status` is 0 when it had none."""
        self.cells[self._in_flight] -= 1
        self.responded(status)

    def responded(self, status: int) -> None:
        """Counts an HTTP response."""
        if 200 <= status < 600:
            self.cells[_CELLS[f"{status // 100}xx"]] += 1

    @property
    def in_flight(self) -> int:
        """HTTP requests that are being answered, in all API processes."""
        return int(self._total()[self._in_flight])

    def counts(self) -> RequestCounts:
        """The sums over all API processes."""
        self.pace.count()
        total = self._total()
        return RequestCounts(
            counters={name: total[_CELLS[name]] for name in _COUNTERS},
            ends={name: total[_CELLS[name]] for name in _REASONS},
            responses={name: total[_CELLS[name]] for name in _STATUSES},
            histograms={
                name: Histogram(bounds, total[start : start + len(bounds) + 1], total[start + len(bounds) + 1])
                for (name, bounds), start in zip(_HISTOGRAMS.items(), self._starts, strict=True)
            },
            in_flight=int(total[self._in_flight]),
        )

    def _total(self) -> list[float]:
        """Every cell, summed over the processes."""
        sums: list[float] = np.frombuffer(self._memory).reshape(-1, self._size).sum(axis=0).tolist()
        return sums


def _claim_row(file: int) -> int:
    """The first row that no running process holds; the lock is released when this process ends."""
    for row in range(MAX_ROWS):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
        except BlockingIOError:
            continue
        return row
    raise OSError(f"more than {MAX_ROWS} processes count together")


class Distribution:
    """A histogram in cells from `start` on: one for each of `bounds`, one for larger values, and the sum."""

    def __init__(self, cells: memoryview[float], start: int, bounds: tuple[float, ...]) -> None:
        self._cells = cells
        self._start = start
        self._sum = start + len(bounds) + 1
        self._bounds = bounds

    def observe(self, value: float, weight: int = 1) -> None:
        """Counts `value`, `weight` times."""
        self._cells[self._start + bisect_left(self._bounds, value)] += weight
        self._cells[self._sum] += value * weight

    def observe_all(self, values: Sequence[float], weights: Sequence[int]) -> None:
        """Counts many values at once, each with its weight; for few of them `observe` is as quick."""
        cells, counts = self._cells, np.asarray(weights)
        places = np.searchsorted(self._bounds, values, side="left")
        for place, count in enumerate(np.bincount(places, counts).tolist(), self._start):
            cells[place] += count
        cells[self._sum] += float(np.dot(values, counts))


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
