"""Metrics sinks that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_metrics_sinks() -> list[Provider]:
    """Structured request logs and OpenTelemetry traces."""
    here = "frame.plugins.sinks"
    return [
        Provider(
            "log",
            f"{here}.log:RequestLog",
            api=_API,
            summary="A JSON line for each request.",
            options=f"{here}.log:LogOptions",
        ),
        Provider(
            "otel",
            f"{here}.otel:TraceExporter",
            api=_API,
            summary="An OpenTelemetry trace for each request (extra otel).",
            options=f"{here}.otel_options:TraceOptions",
        ),
    ]
