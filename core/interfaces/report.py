"""What is told about each generation when it has ended, and who hears it. Knows no HTTP library and no exporter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from .sampling import SamplingParams

if TYPE_CHECKING:
    from .setup import Setup


class RequestReport(msgspec.Struct, kw_only=True, frozen=True):
    """One generation that has ended, however it did: one prompt with its `n` outputs. Times are in seconds.

    `arrival` is in Unix seconds. `queue_seconds` is the wait for the first step, `prefill_seconds` from there to the
    first token, `decode_seconds` from there to the last one; None when it never came that far. `owner` is the beginning
    of the digest of the API key, never the key; `client_id` the X-Request-Id; `headers` holds `traceparent` and
    `tracestate` as the client sent them, which may be anything. `prompt` and `outputs` are None unless a sink asks.
    """

    request_id: str
    model: str
    path: str
    arrival: float
    total_seconds: float
    params: SamplingParams
    finish_reasons: list[str]
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    first_token_seconds: float | None = None
    owner: str = ""
    client_id: str = ""
    headers: dict[str, str] = {}
    prompt: str | None = None
    outputs: list[str] | None = None


class MetricsSink(ABC):
    """Hears of every generation. Built as `Class(setup, options)` in each API process, closed with it.

    Called from the event loop that serves all requests, so it must not wait: whatever sends over a network does so from
    a thread of its own. What it raises is logged and harms no request.
    """

    #: whether reports must hold prompts and outputs
    wants_prompts: bool = False
    wants_outputs: bool = False

    def __init__(self, setup: Setup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @abstractmethod
    def request(self, report: RequestReport) -> None:
        """A generation has ended."""

    def close(self) -> None:
        """Sends what is left. May be called twice."""
