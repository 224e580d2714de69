"""Makes the report of each generation for the metrics sinks. Does nothing when there are no sinks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from ..interfaces.report import MetricsSink, RequestReport
from ..interfaces.sampling import SamplingParams
from .ingress import OWNER, REQUEST
from .request_timer import RequestTimer

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
        self._wants_outputs = any(sink.wants_outputs for sink in sinks)

    def begin(self, request_id: str, params: SamplingParams) -> Notes | None:
        """Starts the notes on a request; None when there are no sinks."""
        return Notes(request_id, params, self._wants_outputs) if self._sinks else None

    def end(self, notes: Notes, timer: RequestTimer) -> None:
        """Reports a request that has ended."""
        report = notes.report(self._model, timer, self._wants_prompts)
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


class Notes:
    """What one request adds to its report while it runs."""

    def __init__(self, request_id: str, params: SamplingParams, with_outputs: bool) -> None:
        self._request_id = request_id
        self._params = params
        self._with_outputs = with_outputs
        self._arrival = time.time()
        self._reasons: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        self._prompt: str | None = None
        self.error: str | None = None

    def see(self, output: Any) -> None:
        """Takes a `RequestOutput`."""
        if self._prompt is None:
            self._prompt = output.prompt
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._reasons[completion.index] = completion.finish_reason
            if self._with_outputs:
                text = self._texts.get(completion.index, "")
                if len(text) < MAX_TEXT:
                    self._texts[completion.index] = (text + completion.text)[:MAX_TEXT]

    def report(self, model: str, timer: RequestTimer, with_prompt: bool) -> RequestReport:
        """The report, now that the request has ended."""
        reasons = [self._reasons.get(index, timer.reason) for index in range(self._params.n)]
        return RequestReport(
            request_id=self._request_id,
            model=model,
            arrival=self._arrival,
            params=self._params,
            finish_reasons=["error"] * len(reasons) if self.error is not None else reasons,
            error=self.error,
            prompt=self._prompt if with_prompt else None,
            outputs=[self._texts[index] for index in sorted(self._texts)] if self._with_outputs else None,
            **timer.figures(),
            **_origin(),
        )


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
