"""`frame bench route`: traces, times, options of policies, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frame.core.cli.main import main

RUN = ("bench", "route", "--no-progress")
SMALL = ("--num-prompts", "60", "--servers", "2", "3")


def rows(count: int, **more: Any) -> str:
    texts = ["You answer in verse. " * 40, "You answer in one word. " * 40]
    found = [
        {
            "messages": [
                {"role": "system", "content": texts[place % 2]},
                {"role": "user", "content": f"{place} why?" * 9},
            ],
            "output_tokens": 5,
            "timestamp": 100 + place / 4,
            **more,
        }
        for place in range(count)
    ]
    return "\n".join(map(json.dumps, found))


def results(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    assert main([*RUN, *arguments, "--output-json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_it_compares_policies_on_prompts_of_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    found = results(tmp_path, "--dataset-name", "shared-prefix", *SMALL, "--html", str(page))
    runs = found["runs"]
    assert [(run["num_servers"], run["policy"]) for run in runs] == [
        (count, name) for count in (2, 3) for name in ("round-robin", "least-load", "text-prefix", "prefix")
    ]
    for run in runs:
        assert 0 <= run["hit_rate"] < 1
        assert 0 < run["p50_ttft_ms"] <= run["p90_ttft_ms"] <= run["p99_ttft_ms"]
    text = capsys.readouterr().out
    assert "TTFT p50, ms" in text
    assert "text-prefix" in text
    assert "<svg" in page.read_text()
    again = results(tmp_path, "--dataset-name", "shared-prefix", *SMALL)
    assert again["runs"] == runs
    assert results(tmp_path, "--dataset-name", "shared-prefix", *SMALL, "--seed", "1")["runs"] != runs


def test_a_trace_is_replayed_at_its_times_or_at_a_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(rows(40))
    own = (str(trace), "--custom-output-len", "-1", "--servers", "2", "--policies", "prefix")
    recorded = results(tmp_path, *own)
    assert recorded["num_prompts"] == 40
    (run,) = recorded["runs"]
    assert run["hit_rate"] > 0.7
    assert results(tmp_path, *own, "--num-prompts", "50")["num_prompts"] == 50
    # all at once instead of ten seconds
    assert results(tmp_path, *own, "--rate-per-server", "1000")["runs"][0]["p99_ttft_ms"] > 2 * run["p99_ttft_ms"]
    slow = results(tmp_path, *own, "--prefill-rate", "100")["runs"][0]
    assert slow["p50_ttft_ms"] > 5 * run["p50_ttft_ms"]


def test_policies_have_their_options(tmp_path: Path) -> None:
    own = ("--dataset-name", "shared-prefix", "--prefix-repetition-num-prefixes", "1", "--num-prompts", "40")
    own += ("--servers", "2", "--policies", "text-prefix", "--rate-per-server", "8")
    found = [
        results(tmp_path, *own, "--plugin.text-prefix.load-tokens", weight)["runs"][0]["imbalance"]
        for weight in ("0", "100000")
    ]
    assert found[0] == 2
    assert found[1] < 1.2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/none.jsonl"], "/none.jsonl cannot be read: No such file or directory"),
        (["--servers", "65"], "--servers must be numbers from 1 to 64, got 65"),
        (["--policies", "magic"], "no route policy 'magic'"),
        (["--plugin.prefix.load-tokens", "-1"], "option load_tokens of plugin 'prefix'"),
        (["--rate-per-server", "0"], "--rate-per-server must be above 0 and finite, got 0"),
        (["--prefill-rate", "nan"], "--prefill-rate must be above 0 and finite, got nan"),
        (["--prefill-rate", "1e400"], "--prefill-rate must be above 0 and finite, got inf"),
        (["--event-seconds", "-1"], "--event-seconds must be at least 0 and finite, got -1"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, *arguments]) == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("time", ['"x"', "true", "NaN", "1e999"])
def test_a_time_that_is_none_is_refused(tmp_path: Path, time: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"prompt": "x", "timestamp": {time}}}')
    assert main([*RUN, str(trace)]) == 1
    assert "row 1: timestamp must be seconds" in capsys.readouterr().err
