"""The benchmarks that start an engine, on the demo model, and the sweep over them."""

from __future__ import annotations

import json

import pytest

from frame.core.cli.main import main

ENGINE = ["--max-num-seqs", "4", "--num-gpu-blocks-override", "256", "--disable-tqdm"]


def test_latency(tmp_path, capsys):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    few = ["--num-iters", "2", "--num-iters-warmup", "1", "--input-len", "4", "--output-len", "3", "--batch-size", "2"]
    assert main(["bench", "latency", *few, *ENGINE, "--output-json", str(out), "--html", str(page)]) == 0
    found = json.loads(out.read_text())
    assert len(found["latencies"]) == 2
    assert min(found["latencies"]) <= found["avg_latency"] <= max(found["latencies"])
    assert set(found["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert found["platform"] == "cpu"
    assert "latency (s)" in page.read_text()
    assert "avg_latency" in capsys.readouterr().out


def test_throughput(tmp_path):
    out = tmp_path / "out.json"
    few = ["--num-prompts", "6", "--input-len", "8", "--output-len", "4", "--num-warmups", "1"]
    assert main(["bench", "throughput", *few, *ENGINE, "--output-json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["num_requests"] == 6
    assert found["total_num_tokens"] == 6 * 12
    assert found["tokens_per_second"] == pytest.approx(72 / found["elapsed_time"])
    assert 0 < found["median_ttft_ms"] <= found["median_e2el_ms"]


def test_throughput_of_a_file(tmp_path):
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    file.write_text('{"prompt": "The sea is"}\n{"prompt": "A book"}\n')
    data = ["--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "3", "--output-len", "2"]
    assert main(["bench", "throughput", *data, *ENGINE, "--output-json", str(out)]) == 0
    assert json.loads(out.read_text())["total_output_tokens"] == 6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["latency", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["latency", "/no/such/folder"], "no folder '/no/such/folder'"),
        (["throughput", "--input-len", "0"], "--input-len must be at least 1"),
        (["throughput", "--num-prompts", "1", "--input-len", "9000", *ENGINE], "9000"),
        (["startup", "--num-iters-cold", "0", "--num-iters-warm", "0"], "nothing to time"),
        (["kernels", "--op", "rms_nrm"], "did you mean rms_norm"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, sentence, capsys):
    assert main(["bench", *arguments]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.matrix
def test_startup(tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    few = ["--num-iters-cold", "1", "--num-iters-warm", "0", "--output-json", str(out)]
    assert main(["bench", "startup", *few, *ENGINE, "--html", str(page)]) == 0
    found = json.loads(out.read_text())
    assert found["avg_cold_startup_time"] < found["avg_cold_first_token_time"]
    assert len(found["cold_startup_times"]) == 1
    assert {"import torch", "weights", "kv cache", "first token"} <= set(found["cold_stages"])
    assert sum(found["cold_stages"].values()) == pytest.approx(found["avg_cold_first_token_time"], rel=0.2)
    assert "Stages (s)" in page.read_text()


def test_kernels(tmp_path, capsys):
    assert main(["bench", "kernels", "--list"]) == 0
    assert "rms_norm" in capsys.readouterr().out
    out = tmp_path / "out.json"
    few = ["--op", "rms_norm", "--op", "paged_attention", "--num-tokens", "2", "--num-iters", "2"]
    assert main(["bench", "kernels", *few, "--disable-tqdm", "--output-json", str(out)]) == 0
    rows = json.loads(out.read_text())["kernels"]
    assert [(row["op"], row["implementation"]) for row in rows] == [
        ("rms_norm", "reference"),
        ("rms_norm", "triton"),
        ("paged_attention", "reference"),
    ]
    assert rows[0]["median_us"] > 0


@pytest.mark.matrix
def test_a_sweep_draws_its_front(tmp_path, capsys):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    vary = ["--vary", "max-num-seqs=2,x", "--output-json", str(out), "--html", str(page), "--disable-tqdm"]
    shared = ["--num-prompts", "4", "--input-len", "4", "--output-len", "4", "--num-gpu-blocks-override", "256"]
    assert main(["bench", "sweep", "throughput", *vary, "--", *shared]) == 0
    found = json.loads(out.read_text())
    assert (found["num_points"], found["num_failed"]) == (2, 1)
    assert [point["max-num-seqs"] for point in found["points"]] == ["2"]
    assert any(point["pareto"] for point in found["points"])
    assert "Throughput against latency" in page.read_text()
    assert "max-num-seqs=2" in page.read_text()
    assert "max-num-seqs=x" in capsys.readouterr().err


def test_a_sweep_of_nothing_that_runs_is_one_sentence(capsys):
    assert main(["bench", "sweep", "serve", "--vary", "request-rate=0", "--disable-tqdm"]) == 1
    assert "none of 1 points could be measured" in capsys.readouterr().err
