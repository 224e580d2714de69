"""The benchmark of two halves on a machine without a GPU: two processes, and halves by turns equal halves apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/kernels/two_halves.py"
SIZES = ["--device", "cpu", "--shape", "tiny", "--layers", "2", "--decodes", "8", "--context", "20", "--prompt", "12"]


@pytest.mark.matrix
def test_halves_are_timed_and_compared_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), *SIZES, "--tokens", "8,24", "--json", str(tmp_path / "x.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    assert [(one["tokens"], one["exchange"]) for one in found] == [
        (tokens, name) for tokens in (8, 24) for name in ("gather", "all-to-all")
    ]
    for one in found:
        assert one["from apart"] == 0
        assert one["from whole"] < 1e-5
        assert one["from first"] < 1e-5
        assert set(one["launched"]) == {"whole", "alone", "apart", "overlap"}


@pytest.mark.matrix
def test_tokens_that_make_no_two_halves_are_refused() -> None:
    command = [sys.executable, str(BENCHMARK), *SIZES, "--tokens", "36"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "36 tokens are no even number of rows of 12" in ended.stderr
