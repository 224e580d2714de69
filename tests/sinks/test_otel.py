"""Traces: spans of a report in memory, and what a real collector's route receives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from frame import SamplingParams
from frame.interfaces import RequestReport, Setup
from frame.plugins.sinks.otel import TraceExporter
from frame.plugins.sinks.otel_options import TraceOptions
from frame.testing import MetricsSinkSuite
from tests.server.running import FAKE, server, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


class InMemory(TraceExporter):
    def processor(self) -> SimpleSpanProcessor:
        self.spans = InMemorySpanExporter()
        return SimpleSpanProcessor(self.spans)


class TestOtel(MetricsSinkSuite):
    target = "tests.sinks.test_otel:InMemory"


def report(**fields: Any) -> RequestReport:
    values: dict[str, Any] = {
        "request_id": "chatcmpl-1", "model": "m", "path": "/v1/chat/completions", "arrival": 1000.0,
        "total_seconds": 4.5, "params": SamplingParams(max_tokens=8, temperature=0.5, n=2),
        "finish_reasons": ["stop", "length"], "prompt_tokens": 7, "cached_tokens": 3, "generated_tokens": 11,
        "queue_seconds": 1.0, "prefill_seconds": 0.5, "decode_seconds": 2.5, "first_token_seconds": 1.5,
    }  # fmt: skip
    return RequestReport(**{**values, **fields})


def spans(one: RequestReport, **options: Any) -> list[Any]:
    sink = InMemory(Setup(), TraceOptions(**options))
    sink.request(one)
    found = list(sink.spans.get_finished_spans())
    sink.close()
    return found


def test_a_request_is_a_span_with_its_phases_below_it() -> None:
    *phases, whole = spans(report(headers={"traceparent": PARENT}))
    assert whole.name == "chat m"
    assert whole.kind.name == "SERVER"
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{whole.parent.span_id:016x}" == PARENT.split("-")[2]
    second = 10**9
    times = [(span.name, span.start_time / second, span.end_time / second) for span in phases]
    assert times == [("queue", 1000.0, 1001.0), ("prefill", 1001.0, 1001.5), ("decode", 1001.5, 1004.0)]
    assert {span.parent.span_id for span in phases} == {whole.context.span_id}
    assert whole.end_time / second == 1004.5
    found = dict(whole.attributes)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.usage.input_tokens"] == 7
    assert found["gen_ai.usage.output_tokens"] == 11
    assert found["gen_ai.usage.cache_read.input_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.choice.count"] == 2
    assert "gen_ai.request.seed" not in found
    assert found["gen_ai.latency.time_in_queue"] == 1.0
    assert found["gen_ai.latency.e2e"] == 4.5


def test_errors_have_the_status_of_one() -> None:
    (whole,) = spans(report(error="it broke", queue_seconds=None, prefill_seconds=None, decode_seconds=None, path=""))
    assert (whole.status.status_code.name, whole.status.description) == ("ERROR", "it broke")
    assert whole.name == "generate m"


def test_the_client_decides_on_sampling_then_the_ratio() -> None:
    assert spans(report(headers={"traceparent": UNSAMPLED})) == []
    assert spans(report(), ratio=0.0) == []
    assert len(spans(report(headers={"traceparent": PARENT}), ratio=0.0)) == 4


def test_broken_trace_headers_begin_a_trace_of_their_own() -> None:
    for text in ("", "nonsense", "00-zz-zz-01", PARENT * 50):
        assert spans(report(headers={"traceparent": text}))[-1].parent is None


def test_addresses_of_collectors() -> None:
    assert TraceOptions(endpoint="collector:4318").endpoint == "http://collector:4318/v1/traces"
    assert TraceOptions(endpoint="https://c/otlp/v1/traces").endpoint == "https://c/otlp/v1/traces"
    with pytest.raises(ValidationError, match="OTLP over HTTP"):
        TraceOptions(endpoint="grpc://collector:4317")


class Collector(BaseHTTPRequestHandler):
    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[SimpleNamespace]:
    received: list[ExportTraceServiceRequest] = []
    handler = type("Handler", (Collector,), {"received": received})
    with HTTPServer(("127.0.0.1", 0), handler) as host:
        thread = threading.Thread(target=host.serve_forever)
        thread.start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{host.server_port}", received=received)
        host.shutdown()
        thread.join()


def test_a_server_sends_its_traces_before_it_ends(collector: SimpleNamespace) -> None:
    with server(FAKE, "--otlp-traces-endpoint", collector.url) as running:
        body = {"prompt": "one two", "max_tokens": 3}
        httpx.post(f"{running.url}/v1/completions", json=body, headers={"traceparent": PARENT}).raise_for_status()
    until(lambda: collector.received)
    (resource,) = collector.received[0].resource_spans
    assert "frame" in [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"]
    found = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(found) == {"text_completion demo", "queue", "prefill", "decode"}
    assert found["text_completion demo"].trace_id.hex() == PARENT.split("-")[1]
