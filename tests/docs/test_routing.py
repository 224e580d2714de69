"""The examples of the page on routing run as they stand, but for their ports, which are free ones."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from frame.routing.settings import add_flags, settings_of
from frame.settings import FlagParser
from tests.docs.blocks import ROOT, blocks, commands
from tests.free_ports import free_ports
from tests.routing.running import route
from tests.server.running import REAL, server

PAGE = ROOT / "docs" / "routing.md"
LINES = commands(PAGE)
FRONTS = [line for line in LINES if line.startswith("frame route ")]
ASKED = [line for line in LINES if line.startswith(("curl ", "frame chat "))]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def both() -> Iterator[dict[str, str]]:
    """The servers of the page → those that stand for them here."""
    wanted = [shlex.split(line)[-1] for line in LINES if line.startswith("frame serve ")]
    assert wanted == ["8001", "8002"]
    with server(REAL, "--num-threads", "1") as first, server(REAL, "--num-threads", "1") as second:
        yield {f"http://127.0.0.1:{port}": one.url for port, one in zip(wanted, (first, second), strict=True)}


def lay_out(folder: Path, places: dict[str, str]) -> None:
    """The files of the page."""
    for block in blocks(PAGE, "text"):
        if not block.mark.startswith("file: "):
            continue
        (folder / block.mark.removeprefix("file: ")).write_text(replaced(block.text, places), encoding="utf-8")


def replaced(text: str, places: dict[str, str]) -> str:
    for there, here in places.items():
        text = text.replace(there, here)
    return text


@pytest.mark.parametrize("line", FRONTS)
def test_lines_that_route_have_the_flags_that_there_are(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, {})
    parser = FlagParser(prog="frame route")
    add_flags(parser)
    assert settings_of(parser.parse_args(shlex.split(line)[2:])).servers


@pytest.mark.some(2)
@pytest.mark.parametrize("line", FRONTS)
def test_every_front_of_the_page_answers(line: str, both: dict[str, str], tmp_path: Path) -> None:
    lay_out(tmp_path, both)
    with route(*shlex.split(replaced(line, both))[2:], "--port", str(free_ports()), cwd=tmp_path) as front:
        key = {"x-api-key": "outer key"}
        assert httpx.get(f"{front.url}/health").status_code == 200
        if "--server-key" not in line:  # the servers here have none
            answer = httpx.post(
                f"{front.url}/v1/completions", json={"prompt": "The sea", "max_tokens": 3}, headers=key, timeout=60
            )
            assert answer.status_code == 200, answer.text
        fleet = httpx.get(f"{front.url}/fleet", headers=key).json()
        assert len(fleet["servers"]) == len({word for word in both.values() if word in str(fleet)})


def test_what_the_page_asks_a_front_is_answered(both: dict[str, str]) -> None:
    assert len(ASKED) == 3
    with route(*both.values()) as front:
        for line in ASKED:
            words = shlex.split(line.replace("http://127.0.0.1:8080", front.url))
            if words[0] == "curl":
                words[1:1] = ["--silent", "--show-error", "--fail"]
            else:
                words[:1] = [sys.executable, "-m", "frame"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()


def test_the_replay_of_the_page_says_what_stands_there() -> None:
    """But for the columns of times, which other versions of numpy may round otherwise."""
    (line,) = [line for line in LINES if line.startswith("frame bench route ")]
    words = [sys.executable, "-m", "frame", *shlex.split(line)[1:], "--no-progress"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    (shown,) = [block.text for block in blocks(PAGE, "text") if block.text.startswith("servers ")]
    rows = [row.split()[:3] for row in shown.splitlines()]
    assert [row.split()[:3] for row in done.stdout.splitlines()[: len(rows)]] == rows


def test_metrics_of_the_page_are_there(both: dict[str, str]) -> None:
    named = set(re.findall(r"`(frame_route_\w+)`", PAGE.read_text(encoding="utf-8")))
    with route(*both.values()) as front:
        httpx.get(f"{front.url}/nothing")
        httpx.request("POST", f"{front.url}/metrics")
        text = httpx.get(f"{front.url}/metrics").text
    there = set(re.findall(r"^# TYPE (frame_route_\w+)", text, re.MULTILINE))
    assert named == there
