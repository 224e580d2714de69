"""`frame bench serve` against a fake server, from the command line to its files."""

from __future__ import annotations

import json

import pytest

from frame.core.cli.main import main
from frame.testing import CommandSuite
from tests.commands.fake_openai import fake_openai

SHORT = ["--num-prompts", "6", "--random-input-len", "12", "--random-output-len", "5", "--disable-tqdm"]


class TestBench(CommandSuite):
    plugin = "bench"


def bench(fake, *flags: str) -> int:
    return main(["bench", "serve", "--base-url", fake.url, *SHORT, *flags])


def test_a_run_writes_json_and_a_page(tmp_path, capsys):
    files = ["--output-json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html")]
    kept = ["--save-detailed", "--result-dir", str(tmp_path / "results"), "--metadata", "machine=mine"]
    with fake_openai() as fake:
        assert bench(fake, *files, *kept, "--goodput", "ttft:60000", "e2el:60000", "--ignore-eos") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["total_input_tokens"] == 72
    assert found["total_output_tokens"] == 30
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["request_rate"] == "inf"
    assert found["model_id"] == "fake"
    assert found["machine"] == "mine"
    assert 0 < found["median_ttft_ms"] <= found["median_e2el_ms"]
    assert "p99_tpot_ms" in found
    assert 0 < found["client_cpu"] < 1.5
    (detailed,) = (tmp_path / "results").iterdir()
    assert detailed.name.startswith("openai-infqps-fake-")
    details = json.loads(detailed.read_text())
    assert details["output_lens"] == [5] * 6
    assert details["generated_texts"] == ["né " * 5] * 6
    assert all(len(gaps) == 4 for gaps in details["itls"])
    page = (tmp_path / "out.html").read_text()
    assert page.count("<svg") == 6
    assert "TTFT (ms)" in page
    assert "output_throughput" in capsys.readouterr().out
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["stream"] for body in fake.bodies)


@pytest.mark.parametrize(
    ("card", "flags", "words"),
    [
        ({"max_model_len": 64}, [], 32),
        ({"max_model_len": 4096}, [], 1024),
        ({"max_model_len": 64}, ["--model", "another"], 1024),
        ({"max_model_len": "64"}, [], 1024),
        ({}, [], 1024),
    ],
)
def test_prompts_fit_the_model_unless_told_otherwise(card: dict, flags: list[str], words: int) -> None:
    with fake_openai(card=card) as fake:
        assert main(["bench", "serve", "--base-url", fake.url, "--num-prompts", "2", "--disable-tqdm", *flags]) == 0
    assert [len(body["prompt"].split()) for body in fake.bodies] == [words] * 2


def test_chats_with_a_key_and_sampling(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    out = tmp_path / "out.json"
    flags = ["--endpoint", "chat", "--top-p", "0.9", "--extra-body", '{"user": "me"}', "--header", "X-A=b"]
    with fake_openai(piece=3) as fake:
        assert bench(fake, *flags, "--output-json", str(out)) == 0
    assert json.loads(out.read_text())["total_output_tokens"] == 30
    assert fake.bodies[0]["messages"][0]["role"] == "user"
    assert fake.bodies[0]["top_p"] == 0.9
    assert fake.bodies[0]["user"] == "me"
    assert fake.headers[0]["authorization"] == "Bearer sk-1"
    assert fake.headers[0]["x-a"] == "b"


def test_concurrency_is_bounded_and_warm_ups_do_not_count(tmp_path):
    out = tmp_path / "out.json"
    with fake_openai(delay=0.001, piece=64) as fake:
        assert bench(fake, "--max-concurrency", "2", "--num-warmups", "3", "--output-json", str(out)) == 0
    found = json.loads(out.read_text())
    assert fake.most_at_once == 2
    assert found["max_concurrent_requests"] <= 2
    assert len(fake.bodies) == 9
    assert found["completed"] == 6


def test_a_rate_spreads_the_requests(tmp_path):
    out = tmp_path / "out.json"
    with fake_openai() as fake:
        assert bench(fake, "--request-rate", "20", "--burstiness", "10", "--output-json", str(out)) == 0
    assert json.loads(out.read_text())["duration"] > 0.25


def test_failures_are_counted_and_named(tmp_path, capsys):
    out = tmp_path / "out.json"
    with fake_openai(fail=frozenset({1, 4})) as fake:
        assert bench(fake, "--output-json", str(out)) == 0
    found = json.loads(out.read_text())
    assert (found["completed"], found["failed"]) == (4, 2)
    assert "2 requests failed; the first: HTTP 429: slow down" in capsys.readouterr().err


def test_no_answer_at_all_is_status_1(capsys):
    with fake_openai(broken=True) as fake:
        assert bench(fake) == 1
    assert "none of 6 requests succeeded" in capsys.readouterr().err
    assert main(["bench", "serve", "--port", "1", "--ready-check-timeout-sec", "0", *SHORT]) == 1
    assert "no server is ready at http://127.0.0.1:1" in capsys.readouterr().err
    assert main(["bench", "serve", "--port", "1", "--ready-check-timeout-sec", "0.6", *SHORT]) == 1
    waits, *others = capsys.readouterr().err.splitlines()
    assert waits.startswith("waiting up to 0.6 s for a server at http://127.0.0.1:1: ")
    assert len(others) == 1


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (b"data: nonsense\n\n", "JSON is malformed"),
        (b"data: [1]\n\n", "no object"),
        (b'data: {"choices": [3]}\n\n', "AttributeError"),
        (b'data: {"error": {"message": "out of luck"}}\n\n', "out of luck"),
    ],
)
def test_odd_answers_are_failures_of_their_request(odd, sentence, capsys):
    with fake_openai(odd=odd) as fake:
        assert bench(fake) == 1
    assert sentence in capsys.readouterr().err


def test_files_that_cannot_be_written_are_refused_first(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for flags in (["--html", str(tmp_path)], ["--output-json", str(tmp_path / "file" / "x.json")]):
        assert main(["bench", "serve", "--port", "1", *flags]) == 1
        assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--percentile-metrics", "ttft,foo"], "no metric 'foo'"),
        (["--metric-percentiles", "50,101"], "numbers from 0 to 100"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--endpoint", "embeddings"], "--endpoint must be completions, chat or a path"),
        (["--base-url", "localhost:8000"], "--base-url must begin with http"),
        (["--goodput", "ttft"], "--goodput"),
        (["--header", "x"], "--header takes NAME=VALUE"),
        (["--tokenizer", "/no/such/folder"], "no folder '/no/such/folder'"),
    ],
)
def test_wrong_arguments_are_one_sentence(flags, sentence, capsys):
    assert main(["bench", "serve", *flags]) == 1
    assert sentence in capsys.readouterr().err


def test_misspelt_flags_and_subcommands_are_status_2(capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", "--request-rat", "3"])
    assert end.value.code == 2
    assert "no flag '--request-rat' (did you mean --request-rate" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["bench", "nonsense"])
    assert end.value.code == 2
