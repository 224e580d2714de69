"""OpenTelemetry traces: a span for each generation with its queue, prefill and decode below it. Extra `otel`.

Spans are made after the end of a request from its report, and sent by a thread of the SDK, so that a slow collector
delays no request. Names follow the semantic conventions for generative AI.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from frame.interfaces import MetricsSink, RequestReport, Setup

from .otel_options import TraceOptions

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError(f"traces need OpenTelemetry ({error}); `pip install 'frame-llm[otel]'` brings it") from None

#: end of a route → operation
_OPERATIONS: Mapping[str, str] = {
    "/chat/completions": "chat", "/completions": "text_completion", "/messages": "chat", "/responses": "chat",
}  # fmt: skip
#: attribute → field of SamplingParams
_REQUEST: Mapping[str, str] = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty", "choice.count": "n",
}  # fmt: skip
#: attribute → field of RequestReport
_LATENCIES: Mapping[str, str] = {
    "time_in_queue": "queue_seconds", "time_to_first_token": "first_token_seconds",
    "time_in_model_prefill": "prefill_seconds", "time_in_model_decode": "decode_seconds", "e2e": "total_seconds",
}  # fmt: skip


class TraceExporter(MetricsSink):
    """Makes spans from reports. With a `traceparent` header the client's span is the parent and decides on sampling."""

    def __init__(self, setup: Setup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._options: TraceOptions = options or TraceOptions()
        resource = Resource.create({"service.name": self._options.service_name})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(self._options.ratio)))
        self._provider.add_span_processor(self.processor())
        self._tracer = self._provider.get_tracer("frame", version("frame-llm"))
        self._propagator = TraceContextTextMapPropagator()

    def processor(self) -> SpanProcessor:
        """The processor that sends the spans; tests replace it."""
        exporter: SpanExporter = OTLPSpanExporter(endpoint=self._options.endpoint)
        return BatchSpanProcessor(exporter)

    def request(self, report: RequestReport) -> None:
        """Makes the spans of a generation."""
        start = _nanoseconds(report.arrival)
        operation = next((name for end, name in _OPERATIONS.items() if report.path.endswith(end)), "generate")
        span = self._tracer.start_span(
            f"{operation} {report.model}",
            context=self._propagator.extract(report.headers),
            kind=trace.SpanKind.SERVER,
            start_time=start,
            attributes=dict(_attributes(report, operation)),
        )
        if report.error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, report.error))
        if span.is_recording():
            below = trace.set_span_in_context(span)
            moment = report.arrival
            for phase in ("queue", "prefill", "decode"):
                seconds = getattr(report, f"{phase}_seconds")
                if seconds is None:
                    break
                part = self._tracer.start_span(phase, context=below, start_time=_nanoseconds(moment))
                moment += seconds
                part.end(_nanoseconds(moment))
        span.end(_nanoseconds(report.arrival + report.total_seconds))

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()


def _attributes(report: RequestReport, operation: str) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "frame"
    yield "gen_ai.request.model", report.model
    yield "gen_ai.response.model", report.model
    yield "gen_ai.response.id", report.request_id
    yield "gen_ai.response.finish_reasons", report.finish_reasons
    yield "gen_ai.usage.input_tokens", report.prompt_tokens
    yield "gen_ai.usage.cache_read.input_tokens", report.cached_tokens
    yield "gen_ai.usage.output_tokens", report.generated_tokens
    for name, field in _REQUEST.items():
        value = getattr(report.params, field)
        if value is not None:
            yield f"gen_ai.request.{name}", value
    for name, field in _LATENCIES.items():
        value = getattr(report, field)
        if value is not None:
            yield f"gen_ai.latency.{name}", value
    if report.path:
        yield "url.path", report.path
    if report.client_id:
        yield "http.request.header.x-request-id", [report.client_id]
    if report.error is not None:
        yield "error.type", "error"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
