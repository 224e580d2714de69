"""Counts new tokens and the times between them in batches: each one alone would cost as much as its text."""

from __future__ import annotations

from .tallies import Distribution

#: Most tokens in a batch, and most seconds that a batch waits while tokens arrive.
_MAX_GAPS = 1024
_MAX_SECONDS = 0.25


class TokenPace:
    """Gathers for all requests of a process; `cells[index]` counts tokens, `between` takes the times."""

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
