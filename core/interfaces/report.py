"""Metrics sinks, and the report of a finished request that they get. Knows no HTTP library and no exporter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from .sampling import SamplingParams

if TYPE_CHECKING:
    from .setup import Setup


class RequestReport(msgspec.Struct, kw_only=True, frozen=True):
    """One prompt with its `n` outputs that has ended, well or not.

    `arrival` is in Unix seconds. `queue_seconds` lasts until the request's first step, `prefill_seconds` from there to
    the first token, `decode_seconds` from there to the last one; each is None if the request did not get so far.
    `owner` is the beginning of the digest of the API key, `client_id` the X-Request-Id. `headers` holds `traceparent`
    and `tracestate` as the client sent them, unchecked. `prompt` and `outputs` are None unless a sink wants them.
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
    """Gets a report of every finished request. Built as `Class(setup, options)` in each API process, closed with it.

    The event loop that serves all requests calls it, so it must not wait: a sink that sends over a network does so from
    a thread of its own. What it raises is logged, and harms no request.
    """

    #: whether reports must hold prompts and outputs
    wants_prompts: bool = False
    wants_outputs: bool = False

    def __init__(self, setup: Setup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @abstractmethod
    def request(self, report: RequestReport) -> None:
        """Called when a request has ended."""

    def close(self) -> None:
        """Sends the reports that are left. May be called twice."""
