"""A request and the record of its answer: datasets make requests, the client fills records, metrics read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BenchRequest:
    """One request: text or token ids, or the messages of a chat. `prompt_len` is 0 where no tokenizer counted it.

    `at` are the seconds at which it was recorded, if it was.
    """

    prompt: str | Sequence[int]
    output_len: int
    prompt_len: int = 0
    messages: Sequence[dict[str, Any]] | None = None
    at: float | None = None


@dataclass
class MeasuredRequest:
    """What happened to one request. Times are in seconds, `started` on the clock of `time.perf_counter`."""

    prompt_len: int = 0
    output_len: int = 0
    started: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        """Whether the whole answer came."""
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first; None for an answer of one token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None
