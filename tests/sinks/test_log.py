"""The request log: what is in a line, and what never is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from frame.plugins.sinks.log import LogOptions, RequestLog, clip
from frame.testing import MetricsSinkSuite, make_setup
from tests.server.running import FAKE, Running, server, until


class TestLog(MetricsSinkSuite):
    plugin = "log"
    options: ClassVar = {"prompts": True, "outputs": True}


class TestLogToFile(MetricsSinkSuite):
    plugin = "log"

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.options = {"file": str(tmp_path / "requests.jsonl")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with server(
        FAKE, "--enable-log-requests", "--enable-log-outputs", "--max-log-len", "9", "--plugin.log.file",
        str(folder / "log.jsonl"), "--api-key", "sk-very-secret", "--plugin.fake.vocab_size", "2048",
    ) as running:  # fmt: skip
        yield running


def ask(running: Running, body: dict[str, Any], **headers: str) -> httpx.Response:
    body = {"max_tokens": 12, "stop": ["private-stop"], "user": "private-user", **body}
    key = {"Authorization": "Bearer sk-very-secret"}
    return httpx.post(f"{running.url}/v1/completions", json=body, headers={**key, **headers}, timeout=30)


def last_line(folder: Path, count: int) -> dict[str, Any]:
    file = folder / "log.jsonl"
    until(lambda: file.exists() and file.read_text().count("\n") >= count)
    line: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
    return line


def test_a_line_tells_what_happened_and_not_what_was_asked(running: Running, folder: Path) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = ask(running, {"prompt": "private words " * 9, "n": 2}, traceparent=trace, **{"x-request-id": "mine"})
    usage = answer.json()["usage"]
    line = last_line(folder, 1)
    assert line["request_id"].startswith(answer.json()["id"])
    assert (line["path"], line["model"], line["event"]) == ("/v1/completions", "demo", "request")
    assert line["finish_reasons"] == ["length", "length"]
    assert (line["prompt_tokens"], line["generated_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert set(line["seconds"]) == {"queue", "prefill", "first_token", "decode", "total"}
    assert line["params"]["max_tokens"] == 12
    assert (line["client_id"], line["trace"]) == ("mine", trace)
    assert len(line["key"]) == 12
    assert [text.partition("…")[0] for text in line["outputs"]] == ["private w"] * 2
    text = (folder / "log.jsonl").read_text() + running.text
    assert "sk-very-secret" not in text
    assert "private-" not in text
    assert "prompt" not in line
    assert (folder / "log.jsonl").stat().st_mode & 0o077 == 0


def test_failures_and_hang_ups_are_lines_as_well(running: Running, folder: Path) -> None:
    count = (folder / "log.jsonl").read_text().count("\n")
    assert ask(running, {"prompt": "x", "extra_args": {"fault": "add"}}).status_code == 400
    line = last_line(folder, count + 1)
    assert line["finish_reasons"] == ["error"]
    assert line["error"].startswith("this requ…")
    assert line["generated_tokens"] == 0
    with (
        httpx.Client(headers={"x-api-key": "sk-very-secret"}) as client,
        client.stream(
            "POST", f"{running.url}/v1/completions",
            json={"prompt": "x y z", "max_tokens": 400, "stream": True, "ignore_eos": True},
        ) as stream,
    ):  # fmt: skip
        next(stream.iter_lines())
    assert last_line(folder, count + 2)["finish_reasons"] in (["abort"], ["length"])


def test_refusals_before_admission_write_no_line(running: Running, folder: Path) -> None:
    count = (folder / "log.jsonl").read_text().count("\n")
    assert httpx.post(f"{running.url}/v1/completions", json={}).status_code == 401
    assert ask(running, {"prompt": 7}).status_code == 400
    ask(running, {"prompt": "x"})
    last_line(folder, count + 1)
    assert (folder / "log.jsonl").read_text().count("\n") == count + 1


def test_clipping_says_how_much_is_left_out() -> None:
    assert clip("abc", 3) == "abc"
    assert clip("abcdef", 2) == "ab… (4 more characters)"
    assert clip("abc", 0) == "… (3 more characters)"


def test_a_file_that_cannot_be_written_is_named_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the log file .* cannot be written: Is a directory$"):
        RequestLog(make_setup("sink"), LogOptions(file=str(tmp_path)))
