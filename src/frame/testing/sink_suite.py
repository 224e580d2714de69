"""The contract of metrics sinks: any report is taken, quickly, and closing is final."""

from __future__ import annotations

import time

import pytest

from frame.core.interfaces.report import MetricsSink, RequestReport
from frame.core.interfaces.sampling import SamplingParams

from .plugin_suite import PluginSuite

_REPORTS = {
    "whole": RequestReport(
        request_id="chatcmpl-1", model="m", path="/v1/chat/completions", arrival=1.7e9, total_seconds=1.5,
        params=SamplingParams(max_tokens=4, seed=2**64 - 1), finish_reasons=["stop"], prompt_tokens=3, cached_tokens=1,
        generated_tokens=4, queue_seconds=0.1, prefill_seconds=0.2, decode_seconds=1.2, first_token_seconds=0.3,
        owner="0123456789ab", client_id="mine", headers={"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
        prompt="What?", outputs=["That."],
    ),
    "bare": RequestReport(
        request_id="a", model="m", path="", arrival=0.0, total_seconds=0.0, params=SamplingParams(max_tokens=None),
        finish_reasons=["abort"],
    ),
    "failed": RequestReport(
        request_id="a", model="m", path="/x", arrival=1.7e9, total_seconds=0.1, params=SamplingParams(n=2),
        finish_reasons=["error", "error"], error="the engine failed", queue_seconds=0.1,
    ),
    "odd": RequestReport(
        request_id="\x00\n\"é\ud800", model="µ", path="/\n", arrival=4e9, total_seconds=1e9, params=SamplingParams(),
        finish_reasons=[], client_id="\xff\n", headers={"traceparent": "00-\n\xff", "tracestate": "=,=" * 999},
        prompt="\ud800" + "a" * 100_000, outputs=["\x1b[31m", ""],
    ),
}  # fmt: skip
_COUNT = 200
_MOST_SECONDS = 2.0


class MetricsSinkSuite(PluginSuite):
    """The contract of `frame.interfaces.MetricsSink`.

        class TestMine(MetricsSinkSuite):
            plugin = "mine"            # or target = "package.module:Class"

    Gives it reports of requests that went well, failed and never ran, and of clients that send odd things.
    """

    kind = "sink"

    def sink(self) -> MetricsSink:
        """A new sink."""
        made = self.make()
        assert isinstance(made, MetricsSink), f"{type(made).__name__} does not derive from MetricsSink"
        return made

    @pytest.mark.parametrize("report", _REPORTS.values(), ids=_REPORTS.keys())
    def test_every_report_is_taken(self, report: RequestReport) -> None:
        sink = self.sink()
        try:
            sink.request(report)
        finally:
            sink.close()

    def test_it_does_not_wait(self) -> None:
        sink = self.sink()
        start = time.perf_counter()
        for _ in range(_COUNT):
            sink.request(_REPORTS["whole"])
        seconds = time.perf_counter() - start
        sink.close()
        assert seconds < _MOST_SECONDS, f"{_COUNT} reports took {seconds:.1f} s; every request waits for that"

    def test_closing_twice_is_harmless(self) -> None:
        sink = self.sink()
        sink.close()
        sink.close()

    def test_what_it_wants_is_a_switch(self) -> None:
        sink = self.sink()
        assert isinstance(sink.wants_prompts, bool)
        assert isinstance(sink.wants_outputs, bool)
        sink.close()
