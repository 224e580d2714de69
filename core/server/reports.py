"""Records each generation, for the metrics of the server, the limits of its key and the metrics sinks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from ..interfaces.report import MetricsSink, RequestReport
from ..interfaces.sampling import SamplingParams
from .ingress import OWNER, REQUEST
from .metrics import ServerMetrics

logger = logging.getLogger("frame.server")

#: Most characters of each output that are kept for sinks that want texts.
MAX_TEXT = 1 << 16
_OWNER_DIGITS = 12
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class Reporter:
    """Passes reports to sinks; logs the failure of a sink and calls it again next time."""

    def __init__(self, model: str, sinks: Sequence[MetricsSink] = ()) -> None:
        self._model = model
        self._sinks = sinks
        self._wants_prompts = any(sink.wants_prompts for sink in sinks)
        self.wants_outputs = any(sink.wants_outputs for sink in sinks)

    def end(self, request_id: str, record: RequestTally) -> None:
        """Reports a request that has ended."""
        if not self._sinks:
            return
        report = record.report(self._wants_prompts, request_id=request_id, model=self._model, **_origin())
        for sink in self._sinks:
            try:
                sink.request(report)
            except Exception:
                logger.exception("metrics sink %s failed", type(sink).__name__)

    def close(self) -> None:
        """Closes the sinks."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:
                logger.exception("metrics sink %s failed to close", type(sink).__name__)


class RequestTally:
    """What happens to one prompt and its outputs, from its arrival until `close`, which adds it to the metrics.

    Times between tokens are taken as outputs arrive; the phases come from the text side (`RequestMetrics`), since an
    answer that is not streamed arrives all at once.
    """

    def __init__(self, metrics: ServerMetrics, params: SamplingParams, keeps_texts: bool = False) -> None:
        self._metrics = metrics
        self._params = params
        self._keeps_texts = keeps_texts
        self._arrival = time.time()
        self._started = self._last = time.perf_counter()
        self._total_seconds = 0.0
        self._prompt: str | None = None
        self._prompt_tokens: int | None = None
        self._cached_tokens = 0
        self._tokens = 0
        self._longest = 0
        self._num_arrivals = 0
        self._times: Any = None
        self._reasons: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        #: how the request ended, and its error if it failed
        self.reason = "abort"
        self.error: str | None = None

    def begin(self, output: Any) -> None:
        """Counts the prompt, at the first output."""
        read = getattr(output, "encoder_prompt_token_ids", None) or ()
        self._prompt_tokens = len(read) + len(output.prompt_token_ids or ())
        self._cached_tokens = output.num_cached_tokens or 0
        self._metrics.prompt(self._prompt_tokens, self._cached_tokens)

    def see(self, output: Any) -> Any:
        """Takes a `RequestOutput`; returns the completion in it that ended with an error, if there is one."""
        if self._prompt_tokens is None:
            self._prompt = output.prompt
            self.begin(output)
        count = longest = 0
        failed = None
        for completion in output.outputs:
            new = len(completion.token_ids)
            count += new
            longest = max(longest, new)
            if completion.finish_reason == "error":
                failed = completion
            elif completion.finish_reason is not None:
                self._reasons[completion.index] = completion.finish_reason
                if output.finished:
                    self.reason = completion.finish_reason
            if self._keeps_texts:
                text = self._texts.get(completion.index, "")
                if len(text) < MAX_TEXT:
                    self._texts[completion.index] = (text + completion.text)[:MAX_TEXT]
        if count and failed is None:
            self._count(count, longest, output.metrics)
        return failed

    def _count(self, total: int, longest: int, times: Any) -> None:
        """Counts `total` tokens that arrived now, at most `longest` of one output; `times` are the request's so far."""
        now = time.perf_counter()
        self._times = times
        if self._num_arrivals:
            self._metrics.pace.add(total, (now - self._last) / longest, longest, now)
        else:
            self._metrics.pace.begin(total)
            self._metrics.observe("time_to_first_token_seconds", self._phases()["first_token_seconds"])
        self._last = now
        self._num_arrivals += 1
        self._tokens += total
        self._longest += longest

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of all outputs so far."""
        return (self._prompt_tokens or 0) + self._tokens

    def close(self) -> None:
        """Adds the request, which has ended, to the metrics."""
        self._total_seconds = time.perf_counter() - self._started
        self._metrics.pace.count()
        self._metrics.finished(self.reason)
        observe = self._metrics.observe
        observe("e2e_request_latency_seconds", self._total_seconds)
        observe("request_params_n", self._params.n)
        observe("request_params_max_tokens", self._params.max_tokens)
        if self._prompt_tokens is not None:
            observe("request_prompt_tokens", self._prompt_tokens)
            observe("request_generation_tokens", self._tokens)
        phases = self._phases()
        for phase in ("queue", "prefill", "decode"):
            observe(f"request_{phase}_time_seconds", phases[f"{phase}_seconds"])
        decode, prefill = phases["decode_seconds"], phases["prefill_seconds"]
        if decode is not None and prefill is not None:
            observe("request_inference_time_seconds", prefill + decode)
        if decode is not None and self._longest > 1:
            gap = decode / (self._longest - 1)
            observe("request_time_per_output_token_seconds", gap)
            if self._num_arrivals == 1:
                observe("inter_token_latency_seconds", gap, self._longest - 1)

    def _phases(self) -> dict[str, Any]:
        """Seconds of each phase as `RequestReport` names them; None for one that was not reached."""
        times = self._times
        arrival, scheduled, first, last = (
            (times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time)
            if times is not None
            else (None,) * 4
        )
        return {
            "queue_seconds": _between(arrival, scheduled),
            "prefill_seconds": _between(scheduled, first),
            "decode_seconds": _between(first, last),
            "first_token_seconds": _between(arrival, first),
        }

    def report(self, with_prompt: bool, **facts: Any) -> RequestReport:
        """The report of the closed request; `facts` are those fields that it does not know."""
        reasons = [self._reasons.get(index, self.reason) for index in range(self._params.n)]
        return RequestReport(
            arrival=self._arrival,
            total_seconds=self._total_seconds,
            params=self._params,
            finish_reasons=["error"] * len(reasons) if self.error is not None else reasons,
            error=self.error,
            prompt_tokens=self._prompt_tokens or 0,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._tokens,
            prompt=self._prompt if with_prompt else None,
            outputs=[self._texts[index] for index in sorted(self._texts)] if self._keeps_texts else None,
            **self._phases(),
            **facts,
        )


def _between(start: float | None, end: float | None) -> float | None:
    """Seconds from `start` to `end`, at least 0 since two processes' clocks may differ; None when either is unknown."""
    return None if start is None or end is None else max(end - start, 0.0)


def _origin() -> dict[str, Any]:
    """The client, path and headers of the current HTTP request; empty outside of one."""
    scope = REQUEST.get()
    if scope is None:
        return {"path": ""}
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of several, the first
    traces = {name.decode(): headers[name].decode("latin-1") for name in _TRACE_HEADERS if name in headers}
    return {
        "path": scope["path"],
        "owner": scope.get(OWNER, "")[:_OWNER_DIGITS],
        "client_id": headers.get(b"x-request-id", b"")[:128].decode("latin-1"),
        "headers": traces,
    }
