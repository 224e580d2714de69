"""`frame run-batch` as a process: files and URLs in and out, mixed routes, bad lines, and going on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message
from openai.types import Completion
from openai.types.chat import ChatCompletion

from frame.core.cli.main import main
from frame.core.config.errors import ConfigError
from frame.plugins.batches.command_run import put_in_order, read_ids, resume
from tests.server.running import until

COMMAND = [sys.executable, str(Path(__file__).with_name("fake_batch.py")), "--no-progress"]
HELLO = [{"role": "user", "content": "Hello there"}]
LINES: list[bytes] = [
    json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
                "body": {"model": "demo", "messages": HELLO, "max_tokens": 5}}).encode(),
    json.dumps({"custom_id": "text", "method": "POST", "url": "/v1/completions",
                "body": {"model": "demo", "prompt": ["one", "two"], "max_tokens": 3}}).encode(),
    b"",
    json.dumps({"custom_id": "message", "method": "POST", "url": "/v1/messages",
                "body": {"model": "demo", "messages": HELLO, "max_tokens": 5}}).encode(),
    b'{"custom_id": "broken"',
    b"[" * 100 + b"]" * 100,
    b'{"custom_id": 5, "url": "/v1/completions", "body": {}}',
    json.dumps({"custom_id": "elsewhere", "url": "http://127.0.0.1/v1/completions", "body": {}}).encode(),
    json.dumps({"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}).encode(),
    json.dumps({"custom_id": "stream", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}}).encode(),
    json.dumps({"custom_id": "refused", "url": "/v1/completions", "body": {"prompt": "x", "n": -1}}).encode(),
]  # fmt: skip


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env=environment)


def run(*arguments: str, status: int = 0) -> str:
    process = start(*arguments)
    with process:
        _, text = process.communicate(timeout=90)
    assert process.returncode == status, text
    return text


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said, in this process, to what ends before anything starts."""
    assert main(["run-batch", "--no-progress", *arguments]) == 1
    return capsys.readouterr().err


def rows_of(data: bytes) -> dict[str | None, dict[str, Any]]:
    rows = [json.loads(line) for line in data.splitlines()]
    assert all(set(row) == {"id", "custom_id", "response", "error"} for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


class Store(BaseHTTPRequestHandler):
    files: dict[str, bytes]

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/in.jsonl")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.files[self.path])

    def do_PUT(self) -> None:
        self.files[self.path.partition("?")[0]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def store() -> Iterator[tuple[str, dict[str, bytes]]]:
    Store.files = {"/in.jsonl": b"\n".join(LINES)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Store.files
    server.shutdown()
    thread.join()
    server.server_close()


def test_urls_mixed_routes_and_bad_lines(
    store: tuple[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, files = store
    text = run("-i", f"{url}/in.jsonl", "-o", f"{url}/out.jsonl?signature=5", "--allow-private-addresses")
    assert "10 lines: 3 succeeded, 7 failed" in text
    assert list(tmp_path.iterdir()) == []
    rows = rows_of(files["/out.jsonl"])
    for name, kind in (("chat", ChatCompletion), ("text", Completion), ("message", Message)):
        assert rows[name]["error"] is None
        assert rows[name]["response"]["status_code"] == 200
        assert rows[name]["response"]["request_id"]
        kind.model_validate(rows[name]["response"]["body"])
    assert len(rows["text"]["response"]["body"]["choices"]) == 2
    for name, words in (("elsewhere", "no route"), ("get", "POST"), ("stream", "not allowed in a batch")):
        assert rows[name]["response"] is None
        assert words in rows[name]["error"]["message"]
    assert rows["refused"]["response"]["status_code"] == 400
    assert rows["refused"]["error"]["message"].startswith("n must be")
    assert None in rows


@pytest.mark.parametrize(("path", "flag", "words"), [
    ("/in.jsonl", [], "private address 127.0.0.1"),
    ("/moved", ["--allow-private-addresses"], "redirects, which is not followed"),
])  # fmt: skip
def test_urls_obey_the_rules(
    store: tuple[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
    flag: list[str],
    words: str,
) -> None:
    assert words in refused(capsys, "-i", store[0] + path, "-o", str(tmp_path / "out.jsonl"), *flag)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "one two three", "max_tokens": 4}
    lines = [json.dumps({"custom_id": f"n{n}", "url": "/v1/completions", "body": body}) for n in range(12)]
    source.write_text("\n".join(lines))
    arguments = ["-i", str(source), "-o", str(target), "--width", "1", "--plugin.fake.delay", "0.05"]
    with start(*arguments) as process:
        try:
            until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 3, 60)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    before = target.read_bytes()
    num_done = before.count(b"\n")
    assert num_done < 12
    with target.open("ab") as file:
        file.write(b'{"id": "batch_req_0000')  # the kill came in the middle of a row
    text = run(*arguments)
    assert f"{num_done} answered by an earlier run" in text
    after = target.read_bytes()
    assert after.startswith(before[: before.rindex(b"\n") + 1])
    assert set(rows_of(after)) == {f"n{n}" for n in range(12)}
    assert "0 succeeded, 0 failed, 12 answered by an earlier run" in run(*arguments)


def test_what_is_kept_of_an_earlier_run(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"one\n\ntwo\ntwo\n")
    ids = read_ids(source)
    assert len(set(ids)) == 3
    rows = [
        {"id": ids[0], "custom_id": "a", "response": {"status_code": 200}, "error": None},
        {"id": ids[1], "custom_id": "b", "response": {"status_code": 503}, "error": {}},
        {"id": ids[2], "custom_id": "c", "response": None, "error": {}},
    ]
    encoded = [json.dumps(row).encode() + b"\n" for row in rows]
    target.write_bytes(b"".join(encoded))
    assert resume(target, ids) == {ids[0], ids[2]}
    assert target.read_bytes() == encoded[0] + encoded[2]
    for foreign in (b"something\n", b'{"id": "batch_req_other"}\n'):
        target.write_bytes(encoded[0] + foreign)
        with pytest.raises(ConfigError, match="something else than results"):
            resume(target, ids)
        assert target.read_bytes() == encoded[0] + foreign
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_results_are_put_into_the_order_of_the_input(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(b"line %d\n" % number for number in range(50)))
    rows = [json.dumps({"id": name, "text": "x" * number}) for number, name in enumerate(read_ids(source))]
    target.write_text("\n".join(rows[::-1]) + "\n")
    put_in_order(target)
    assert target.read_text().splitlines() == rows
    put_in_order(target)
    assert target.read_text().splitlines() == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    put_in_order(tmp_path / "nothing")


def test_wrong_files_are_told_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no input file" in refused(capsys, "-i", "nowhere.jsonl", "-o", str(tmp_path / "out.jsonl"))
    (tmp_path / "in.jsonl").write_bytes(b"")
    assert "no folder" in refused(capsys, "-i", str(tmp_path / "in.jsonl"), "-o", "/no/such/folder/out.jsonl")
    for device in ("/dev/full", "/dev/null"):  # the first is read without end
        said = refused(capsys, "-i", str(tmp_path / "in.jsonl"), "-o", device)
        assert said == f"frame: the results cannot be kept in '{device}', which is no file\n"


def test_a_disk_without_room_is_told_with_the_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"broken\n" * 4000)
    limited = ["bash", "-c", 'ulimit -f 512 && exec "$@"', "-", *COMMAND, "-i", str(source), "-o", str(target)]
    ended = subprocess.run(limited, stderr=subprocess.PIPE, text=True, timeout=90)
    assert ended.returncode == 1
    assert f"frame: {target} cannot be read or written: File too large\n" in ended.stderr
    assert "Traceback" not in ended.stderr
