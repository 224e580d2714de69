"""Whatever is sent to a route that the OpenAPI document describes, no answer is 5xx, none is late, nothing grows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.security.schema_run import Outcome, resident_bytes, run
from tests.server.running import REAL, Running, server

#: Answers are short, so that many fit into the time.
_SETTINGS = ("--max-model-len", "48", "--max-n", "2", "--max-prompts", "2", "--disable-access-log")
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
_GROWTH_BYTES = 384 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = str(tmp_path_factory.mktemp("batches"))
    with server(REAL, *_SETTINGS, *_TOOLS, "--plugin.batches.folder", folder) as running:
        yield running


def is_well(served: Running) -> None:
    """It still answers, and nothing of it died meanwhile."""
    answer = httpx.post(served.url + "/v1/completions", json={"prompt": "The sea", "max_tokens": 4}, timeout=60)
    assert answer.status_code == 200
    assert "starting it again" not in served.text
    assert "Traceback" not in served.text


def passed(outcome: Outcome, cases: int) -> None:
    assert outcome.status == 0, outcome.text[-6000:]
    assert outcome.cases >= cases, outcome.text[-2000:]


@pytest.mark.matrix
def test_a_few_cases_of_every_operation(served: Running, tmp_path: Path) -> None:
    passed(run(served, tmp_path, "--phases", "fuzzing", "-n", "4"), 100)
    is_well(served)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("pooling", [False, True], ids=["generate", "pool"])
def test_ten_thousand_cases(pooling: bool, tmp_path: Path) -> None:
    settings = ("--runner", "pooling", "--convert", "embed") if pooling else _TOOLS
    batches = ("--plugin.batches.folder", str(tmp_path))
    examples = os.environ.get("SCHEMA_EXAMPLES", "150")
    with server(REAL, *_SETTINGS, *settings, *batches) as served:
        processes = {"parent": served.process.pid, **served.children()}
        passed(run(served, tmp_path, "--phases", "fuzzing", "-n", "10", seconds=1200), 100)  # caches fill
        before = {name: resident_bytes(pid) for name, pid in processes.items()}
        begun = time.monotonic()
        outcome = run(served, tmp_path, "-n", examples, seconds=6000)
        seconds = time.monotonic() - begun
        after = {name: resident_bytes(pid) for name, pid in processes.items()}
        print(outcome.text[-1500:], before, after, f"{outcome.cases} cases in {seconds:.0f} s", sep="\n")
        passed(outcome, 10_000)
        assert all(after[name] - before[name] < _GROWTH_BYTES for name in before), (before, after)
        if not pooling:
            is_well(served)
