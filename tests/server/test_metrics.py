"""Metrics: names, both sets of them, and counts that several processes share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from frame import SamplingParams
from frame.core.front.outputs import RequestMetrics
from frame.core.interfaces.client import EngineInfo
from frame.core.interfaces.engine import EngineStats
from frame.core.server.metrics import Distribution, ServerMetrics, TokenPace
from frame.core.server.reports import RequestTally
from frame.plugins.endpoints.exposition import Exposition
from tests.server.running import FAKE, server, until

INFO = EngineInfo(
    max_model_len=64, vocab_size=8, num_blocks=9, block_size=4, platform="fake", attention=["fake"], dtype="float32"
)
#: What dashboards made for vLLM ask for.
VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total",
    "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket",
    "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_inference_time_seconds_sum",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_max_num_generation_tokens_sum",
    "request_params_n_sum", "request_params_max_tokens_sum", "cache_config_info", "prompt_tokens_cached_total",
)  # fmt: skip
COUNT = """
import sys
from frame.core.server.metrics import ServerMetrics
metrics = ServerMetrics(int(sys.argv[1]))
metrics.pace.begin(5)
metrics.pace.count()
metrics.entered()
print(metrics.in_flight, flush=True)
sys.stdin.read()
"""


def exposition(stats: EngineStats, metrics: ServerMetrics | None = None, *, vllm_names: bool = True) -> str:
    counts = (metrics or ServerMetrics()).counts()
    return Exposition("m", counts, stats, INFO, vllm_names).encoded().decode()


def samples(metrics: ServerMetrics | None = None, *, vllm_names: bool = False) -> dict[str, float]:
    text = exposition(EngineStats(running=2, kv_usage=0.5), metrics, vllm_names=vllm_names)
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "m"
            rest = ",".join(f"{key}={value}" for key, value in sample.labels.items() if key not in ("model_name",))
            found[f"{sample.name}{{{rest}}}"] = sample.value
    return found


def test_own_names_alone_unless_asked() -> None:
    own = samples()
    assert all(name.startswith("frame_") for name in own)
    both = samples(vllm_names=True)
    assert {name for name in both if name.startswith("frame_")} == set(own)
    theirs = {name.partition("{")[0].removeprefix("vllm:") for name in both if name.startswith("vllm:")}
    assert set(VLLM) <= theirs
    assert both["vllm:gpu_cache_usage_perc{engine=0}"] == both["frame_kv_cache_usage_perc{engine=0}"] == 0.5


def test_what_a_connector_reports_is_shown_under_its_names() -> None:
    stats = EngineStats(connector_counters={"disk_saved_blocks": 3.0, "odd_total": 1.0}, connector_gauges={"kept": 2.5})
    text = exposition(stats)
    found = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    assert found["frame_kv_connector_disk_saved_blocks_total"].value == 3
    assert found["frame_kv_connector_odd_total"].value == 1
    assert found["frame_kv_connector_kept"].value == 2.5
    assert found["frame_kv_connector_kept"].labels == {"model_name": "m", "engine": "0"}
    assert "vllm:kv_connector" not in text


def tiers(*ranks: EngineStats) -> dict[tuple[str, ...], float]:
    """Value by (metric, engine, connector, tier, direction) of what is shown of tiers."""
    text = exposition(EngineStats(ranks=list(ranks)) if len(ranks) > 1 else ranks[0])
    labels = ("engine", "connector", "tier", "direction")
    return {
        (sample.name.removeprefix("frame_kv_tier_"), *(sample.labels.get(name, "") for name in labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("frame_kv_tier_")
    }


def test_numbers_of_connectors_whose_names_say_what_they_are_have_labels() -> None:
    counters = {
        "offload_load_bytes": 10.0, "offload_load_seconds": 0.5, "offload_save_bytes": 20.0, "offload_hit_tokens": 7.0,
        "offload_disk_read_bytes": 3.0, "offload_disk_lost_blocks": 1.0, "offload_unsaved_blocks": 2.0,
        "disk_0_loaded_blocks": 4.0, "disk_1_loaded_blocks": 5.0, "own_store_failed_blocks": 6.0,
        "odd": 1.0, "odd_number": 1.0, "bytes": 1.0, "load_bytes": 1.0, "nixl_direct_reads": 1.0,
    }  # fmt: skip
    gauges = {"offload_used_bytes": 8.0, "nixl_held_blocks": 9.0, "kept": 1.0}
    assert tiers(EngineStats(connector_counters=counters, connector_gauges=gauges)) == {
        ("bytes_total", "0", "offload", "host", "load"): 10,
        ("bytes_total", "0", "offload", "host", "save"): 20,
        ("bytes_total", "0", "offload", "disk", "load"): 3,
        ("seconds_total", "0", "offload", "host", "load"): 0.5,
        ("hit_tokens_total", "0", "offload", "host", ""): 7,
        ("failed_blocks_total", "0", "offload", "host", "save"): 2,
        ("failed_blocks_total", "0", "offload", "disk", "save"): 1,
        ("failed_blocks_total", "0", "own_store", "own_store", "load"): 6,
        ("blocks_total", "0", "disk_0", "disk", "load"): 4,
        ("blocks_total", "0", "disk_1", "disk", "load"): 5,
        ("used_bytes", "0", "offload", "host", ""): 8,
        ("held_blocks", "0", "nixl", "engine", ""): 9,
    }


def test_engines_have_their_own_numbers_of_a_tier_and_none_are_shown_without_a_connector() -> None:
    ranks = [EngineStats(rank=rank, connector_counters={"disk_saved_blocks": 1.0 + rank}) for rank in range(2)]
    assert tiers(*ranks) == {
        ("blocks_total", str(rank), "disk", "disk", "save"): 1.0 + rank for rank in range(2)
    }  # fmt: skip
    assert tiers(EngineStats()) == {}


def test_names_are_what_prometheus_recommends() -> None:
    text = exposition(EngineStats())
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            name, kind = line.split()[2:]
            assert re.fullmatch(r"(frame_|vllm:)[a-z0-9_]+", name)
            assert name.endswith("_total") == (kind == "counter")


def seen(num_tokens: list[int], times: RequestMetrics, finished: bool = False) -> Any:
    """A `RequestOutput` of a prompt of ten tokens, four of them cached, with so many new tokens for each output."""
    reason = "length" if finished else None
    outputs = [
        SimpleNamespace(index=index, token_ids=[0] * count, text="", finish_reason=reason)
        for index, count in enumerate(num_tokens)
    ]
    return SimpleNamespace(
        prompt="", prompt_token_ids=[0] * 10, num_cached_tokens=4, outputs=outputs, finished=finished, metrics=times
    )


def test_a_request_is_counted_once_in_every_distribution() -> None:
    metrics = ServerMetrics()
    record = RequestTally(metrics, SamplingParams(n=2, max_tokens=7))
    times = RequestMetrics(10.0, first_scheduled_time=9.9, first_token_time=10.5)  # clocks of two processes
    for moment in (10.5, 11.0, 11.5):
        times.last_token_time = moment
        record.see(seen([1, 1], times, finished=moment == 11.5))
    record.close()
    found = samples(metrics)
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
        "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens",
        "request_params_n", "request_params_max_tokens",
    ):  # fmt: skip
        assert found[f"frame_{name}_count{{}}"] == 1, name
        assert found[f"frame_{name}_bucket{{le=+Inf}}"] == 1, name
    assert found["frame_inter_token_latency_seconds_count{}"] == 2
    assert found["frame_request_queue_time_seconds_sum{}"] == 0
    assert found["frame_time_to_first_token_seconds_sum{}"] == 0.5
    assert found["frame_request_decode_time_seconds_sum{}"] == 1.0
    assert found["frame_request_time_per_output_token_seconds_sum{}"] == 0.5
    assert found["frame_request_generation_tokens_sum{}"] == 6
    assert found["frame_generation_tokens_total{}"] == 6
    assert found["frame_prompt_tokens_total{}"] == 10
    assert found["frame_prompt_tokens_cached_total{}"] == 4
    assert found["frame_request_success_total{finished_reason=length}"] == 1
    assert found["frame_request_prompt_tokens_bucket{le=10.0}"] == 1
    assert found["frame_request_prompt_tokens_bucket{le=5.0}"] == 0


def test_an_answer_in_one_piece_has_the_times_of_a_streamed_one() -> None:
    metrics = ServerMetrics()
    record = RequestTally(metrics, SamplingParams(max_tokens=5))
    times = RequestMetrics(10.0, first_scheduled_time=10.1, first_token_time=10.5, last_token_time=12.5)
    record.see(seen([5], times))
    record.close()
    found = samples(metrics)
    assert found["frame_time_to_first_token_seconds_sum{}"] == 0.5
    assert found["frame_inter_token_latency_seconds_count{}"] == 4
    assert found["frame_inter_token_latency_seconds_sum{}"] == 2.0
    assert found["frame_inter_token_latency_seconds_bucket{le=0.5}"] == 4


def test_a_request_that_never_ran_counts_as_aborted() -> None:
    metrics = ServerMetrics()
    RequestTally(metrics, SamplingParams(max_tokens=None)).close()
    found = samples(metrics)
    assert found["frame_request_success_total{finished_reason=abort}"] == 1
    assert found["frame_e2e_request_latency_seconds_count{}"] == 1
    assert found["frame_time_to_first_token_seconds_count{}"] == found["frame_request_prompt_tokens_count{}"] == 0


def test_processes_count_together_and_successors_go_on_from_the_counts_of_the_dead() -> None:
    file = os.memfd_create("metrics")
    metrics = ServerMetrics(file)
    metrics.pace.begin(1)
    metrics.entered()
    for tokens in (6, 11):
        with count(file) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "2\n"
            assert metrics.in_flight == 2
            assert samples(metrics)["frame_generation_tokens_total{}"] == tokens
            other.kill()
        assert samples(metrics)["frame_generation_tokens_total{}"] == tokens
    os.close(file)


def count(file: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COUNT, str(file)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[file])


@pytest.mark.parametrize(("value", "bucket"), [(0.5, 0), (1.0, 0), (1.5, 1), (9.0, 2)])
def test_a_bucket_holds_its_upper_bound(value: float, bucket: int) -> None:
    bounds = (1.0, 2.0)
    cells = memoryview(bytearray(8 * 4)).cast("d")
    Distribution(cells, 0, bounds).observe(value, 3)
    assert cells.tolist() == [3.0 * (index == bucket) for index in range(3)] + [3 * value]


def test_times_gathered_between_tokens_are_those_counted_one_by_one() -> None:
    bounds, values, weights = (1.0, 2.0, 5.0), [0.5, 1.0, 9.0, 1.5, 1.0], [1, 2, 3, 1, 1]
    one, other = (memoryview(bytearray(8 * 6)).cast("d") for _ in range(2))
    pace = TokenPace(one, 5, Distribution(one, 0, bounds))
    for value, weight in zip(values, weights, strict=True):
        pace.add(weight, value, weight, now=0.0)
        Distribution(other, 0, bounds).observe(value, weight)
    assert not any(one)
    pace.count()
    pace.count()
    assert one.tolist()[:5] == other.tolist()[:5]
    assert one[5] == sum(weights)


def test_gathered_tokens_wait_for_a_moment_only() -> None:
    metrics = ServerMetrics()
    for moment in (0.0, 1.0):
        metrics.pace.add(1, 0.1, 1, now=100 + moment)
    assert metrics.cells[2] == 2


def test_statuses_are_counted_by_class() -> None:
    metrics = ServerMetrics()
    metrics.entered()
    metrics.left(200)
    for status in (404, 401, 503, 0):
        metrics.responded(status)
    found = samples(metrics)
    assert [found[f"frame_http_responses_total{{status={name}}}"] for name in ("2xx", "4xx", "5xx")] == [1, 2, 1]
    assert metrics.in_flight == 0


def test_every_api_process_of_a_server_tells_the_counts_of_all() -> None:
    with server(FAKE, "--api-server-count", "2", "--plugin.fake.vocab_size", "2048") as running:
        for _ in range(8):
            httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}).raise_for_status()
        until(lambda: {running.metric("frame_generation_tokens_total") for _ in range(8)} == {24})
