"""The parts of `frame bench` that need no server: events, arrivals, figures, datasets, plots, sweeps."""

from __future__ import annotations

import itertools
import json
import math
import random
import xml.etree.ElementTree as ElementTree  # reads what we wrote ourselves
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from frame.core.cli.main import main
from frame.core.config.errors import ConfigError
from frame.plugins.commands.bench import metrics, plots, report, sweep
from frame.plugins.commands.bench.arrivals import arrival_times
from frame.plugins.commands.bench.datasets import add_dataset_flags, make_requests
from frame.plugins.commands.bench.event_reader import EventReader
from frame.plugins.commands.bench.plots import Plot, Series
from frame.plugins.commands.bench.record import MeasuredRequest
from frame.plugins.commands.bench.text_source import TokenizerSource, WordSource

DEMO = Path(__file__).parents[2] / "plugins" / "models" / "demo"
STREAM = (
    '\ufeffdata: {"a": "é"}\r\n\r\n: note\ndata: one\ndata:two\n\nevent: x\rdata: ünï\r\rdata\n\nid: 4\n\n'.encode()
)
EVENTS = ['{"a": "é"}', "one\ntwo", "ünï", ""]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_wherever_chunks_are_cut(cuts):
    stream, found = EventReader(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        found += stream.feed(STREAM[start:end])
    assert found == EVENTS


def test_a_poisson_process_has_the_rate_that_was_named():
    times = arrival_times(4000, 10.0, 1.0, random.Random(0))
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(400)
    assert times == sorted(times)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    steady = np.diff(arrival_times(4000, 10.0, 100.0, random.Random(0)))
    assert steady.std() / steady.mean() == pytest.approx(0.1, abs=0.03)
    assert arrival_times(3, math.inf, 1.0, random.Random(0)) == [0, 0, 0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values, percent):
    assert metrics.percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


def records() -> list[MeasuredRequest]:
    return [
        MeasuredRequest(10, 5, 0.0, 0.1, 0.5, [0.1] * 4),
        MeasuredRequest(20, 3, 0.2, 0.3, 1.3, [0.5] * 2),
        MeasuredRequest(30, 0, 0.3, 0.0, 0.1, error="HTTP 500"),
    ]


def test_figures_have_vllms_names_and_leave_failures_out():
    figures = metrics.serve_figures(
        records(), 2.0, metrics=["ttft", "tpot", "itl", "e2el"], percents=[99.0, 99.9], goodput={"ttft": 200.0}
    )
    assert figures["completed"] == 2
    assert figures["failed"] == 1
    assert figures["total_input_tokens"] == 30
    assert figures["total_output_tokens"] == 8
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 4.0
    assert figures["total_token_throughput"] == 19.0
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["median_itl_ms"] == pytest.approx(100)
    assert figures["mean_tpot_ms"] == pytest.approx((100 + 500) / 2)
    assert figures["p99_e2el_ms"] == pytest.approx(np.percentile([500, 1300], 99))
    assert "p99.9_ttft_ms" in figures
    assert figures["max_concurrent_requests"] == 3
    assert figures["max_output_tokens_per_s"] == 6


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:-1", "ttft:x", "ttft:nan"])
def test_a_wrong_goodput_is_one_sentence(text):
    with pytest.raises(ConfigError, match="--goodput"):
        metrics.parse_goodput([text])


def dataset(*flags: str, source=None):
    parser = ArgumentParser()
    add_dataset_flags(parser, num_prompts=20)
    return make_requests(parser.parse_args(flags), source or WordSource())


@pytest.fixture(scope="module")
def demo_tokenizer() -> TokenizerSource:
    return TokenizerSource(DEMO)


def test_random_prompts_have_their_length_and_are_the_same_again(demo_tokenizer):
    flags = ("--random-input-len", "40", "--random-output-len", "10", "--random-range-ratio", "0.5")
    made = dataset(*flags, source=demo_tokenizer)
    assert made == dataset(*flags, source=demo_tokenizer)
    assert made != dataset(*flags, "--seed", "1", source=demo_tokenizer)
    assert all(20 <= one.prompt_len <= 60 and 5 <= one.output_len <= 15 for one in made)
    assert all(demo_tokenizer.count(one.prompt) == one.prompt_len for one in made)
    assert len({one.prompt_len for one in made}) > 5
    exact = dataset("--random-input-len", "40", source=demo_tokenizer)
    assert sum(one.prompt_len == 40 for one in exact) >= 18


def test_prefixes_are_shared():
    made = dataset("--dataset-name", "shared-prefix", "--prefix-repetition-num-prefixes", "4")
    prefixes = {" ".join(one.prompt.split()[:256]) for one in made}
    assert len(prefixes) == 4
    assert len({one.prompt for one in made}) == 20
    assert [one.prompt for one in made] == [
        one.prompt for one in dataset("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "4")
    ]


def test_files(tmp_path):
    talk = {"conversations": [{"from": "human", "value": "Tell me all of it."}, {"from": "gpt", "value": "no " * 20}]}
    short = {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "yes"}]}
    (tmp_path / "talks.json").write_text(json.dumps([talk, short]))
    made = dataset("--dataset-name", "sharegpt", "--dataset-path", str(tmp_path / "talks.json"))
    assert {(one.prompt, one.output_len) for one in made} == {("Tell me all of it.", 15)}
    rows = [
        {"prompt": "a b", "output_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}], "output_tokens": 9},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    path = str(tmp_path / "rows.jsonl")
    made = dataset("--dataset-name", "custom", "--dataset-path", path, "--custom-output-len", "-1")
    assert [one.output_len for one in made] == [3, 9] * 10
    assert made[1].messages == rows[1]["messages"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--dataset-name", "randm"], "did you mean random"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/no/such"], "cannot be read"),
        (["--num-prompts", "0"], "at least 1"),
        (["--random-range-ratio", "1"], "below 1"),
        (["--random-input-len", "0"], "--random-input-len must be at least 1"),
    ],
)
def test_wrong_datasets_are_one_sentence(flags, sentence):
    with pytest.raises(ConfigError, match=sentence):
        dataset(*flags)


def test_lines_of_files_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ')
    with pytest.raises(ConfigError, match="line 2 is not valid JSON"):
        dataset("--dataset-name", "custom", "--dataset-path", str(path))
    path.write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match='row 1 must have a text "prompt"'):
        dataset("--dataset-name", "custom", "--dataset-path", str(path))


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_cover_what_is_drawn(low, width):
    marks = plots.ticks(low, low + width)
    assert 2 <= len(marks) <= 13
    slack = 1e-6 * (abs(low) + width) + 1e-9
    assert marks[0] <= low + slack
    assert marks[-1] >= low + width - slack


def test_a_page_is_whole_and_loads_nothing():
    plot = Plot("A <title>", "time (s)", "share (%)", [
        Series("one", [(0, 1), (2, 5)], "step"),
        Series("two & three", [(1, 1)], "points", ["<script>alert(1)</script>"]),
    ])  # fmt: skip
    drawn = plots.svg(plot)
    tree = ElementTree.fromstring(drawn)  # noqa: S314
    words = "".join(tree.itertext())
    assert {"A <title>", "time (s)", "share (%)", "two & three"} <= {text.strip() for text in tree.itertext()}
    assert "<script>alert(1)</script>" in words
    text = report.page("Run", "about <b>", [report.fact_table("Facts", {"model": "<i>", "rate": 1234567.0})], [plot])
    assert "<script" not in text
    assert "<i>" not in text
    assert "http" not in text
    assert "prefers-color-scheme: dark" in text
    assert "1,234,567" in text
    assert "<script>" not in plots.svg(
        Plot("P", "x", "y", [Series("a", [(1, 2)], "points", ["<script>"], labelled=True)])
    )
    assert "nothing was measured" in plots.svg(Plot("Empty", "x", "y", [Series("none", [])]))


def test_a_grid_is_every_combination(tmp_path):
    points = sweep.grid(["max-concurrency=1,4", "--request_rate=2"], None)
    assert points == [{"max-concurrency": "1", "request-rate": "2"}, {"max-concurrency": "4", "request-rate": "2"}]
    file = tmp_path / "grid.yaml"
    file.write_text("max_num_seqs: [8, 16]\nenable_prefix_caching: [true, false]\n")
    assert len(sweep.grid([], str(file))) == 4
    file.write_text("- {request-rate: 1}\n- {request-rate: 2, burstiness: 0.5}\n")
    assert sweep.grid([], str(file)) == [{"request-rate": "1"}, {"request-rate": "2", "burstiness": "0.5"}]
    command = sweep.command_of("serve", {"ignore-eos": "true", "x": "false", "rate": "2"}, ["--n", "1"], "out")
    assert command[4:] == [
        "bench", "serve", "--n", "1", "--ignore-eos", "--no-x", "--rate=2", "--disable-tqdm", "--output-json", "out"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("varied", "content", "sentence"),
    [
        ([], None, "nothing varies"),
        (["rate"], None, "FLAG=VALUE"),
        (["rate=1,,2"], None, "FLAG=VALUE"),
        ([], "4", "must hold flags"),
        ([], "a: [", "is not YAML"),
        ([], "- 3", "a point must map"),
        ([], "a: []", "no values"),
        (["a=" + ",".join("1" * 40), "b=" + ",".join("1" * 40)], None, "1600 points"),
    ],
)
def test_wrong_grids_are_one_sentence(tmp_path, varied, content, sentence):
    file = None
    if content is not None:
        (tmp_path / "grid.yaml").write_text(content)
        file = str(tmp_path / "grid.yaml")
    with pytest.raises(ConfigError, match=sentence):
        sweep.grid(varied, file)


def test_the_pareto_front_is_what_nothing_beats():
    points = [(1.0, 10.0), (2.0, 30.0), (2.0, 20.0), (3.0, 25.0), (4.0, 40.0), (1.0, 5.0), (5.0, 40.0)]
    assert sweep.pareto(points) == {0, 1, 4}


def test_a_missing_subcommand_is_an_error_with_the_choices(capsys):
    assert main(["bench"]) == 1
    assert "needs a SUBCOMMAND; there are: serve, latency, throughput" in capsys.readouterr().err
