"""The table of runs by frame and its peer, from raw results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RAGGED = "256 × (100–1024 → 100–1024)"


def result(folder: Path, engine: str, seconds: float, device: str = "a GPU") -> str:
    """A file as `offline_gpu.py` writes it."""
    line: dict[str, Any] = {"model": "qwen3-14b", "run": RAGGED, "seconds": seconds}
    about = {"engine": engine, "engine_version": "1", "torch": "2", "triton": "3", "device": device, "date": "today"}
    file = folder / f"{engine}-{seconds}.json"
    lines = [{"model": "qwen3-14b", "run": "start", "seconds": 5.0}, {**line, "tokens_in": 3000, "tokens_out": 2000}]
    file.write_text(json.dumps({**about, "results": lines}))
    return str(file)


def table(*files: str) -> subprocess.CompletedProcess[str]:
    """The command's output."""
    command = [sys.executable, str(BENCHMARKS / "table.py"), *files]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_best_of_each_engine_their_ratio_and_the_floor(tmp_path: Path) -> None:
    files = [result(tmp_path, "frame", 2.0), result(tmp_path, "frame", 1.0), result(tmp_path, "vllm", 4.0)]
    lines = table(*files).stdout.splitlines()
    assert lines[0].startswith("a GPU · frame 1, torch 2, triton 3, today · vllm 1")
    model, run, theirs, ours, ratio, floor, share, target = (cell.strip() for cell in lines[4].strip("|").split("|"))
    assert (model, run, theirs, ours, ratio) == ("qwen3-14b", RAGGED, "500", "2,000", "4.00")
    assert target == "≥ 1.12"
    assert abs(2000 / float(floor.replace(",", "")) - float(share)) < 0.01
    assert "| 5.0 s | 5.0 s | 1.0 |" in lines[5]


def test_one_engine_alone_has_no_ratio_and_two_devices_no_table(tmp_path: Path) -> None:
    assert f"| {RAGGED} |  | 2,000 |  |" in table(result(tmp_path, "frame", 1.0)).stdout
    refused = table(result(tmp_path, "frame", 1.0), result(tmp_path, "vllm", 1.0, "another GPU"))
    assert refused.returncode
    assert "of one device make a table, not of a GPU, another GPU" in refused.stderr


def test_a_ratio_below_its_target_is_marked(tmp_path: Path) -> None:
    lines = table(result(tmp_path, "frame", 2.0), result(tmp_path, "vllm", 2.1)).stdout.splitlines()
    assert lines[4].endswith("| ≥ 1.12, missed |")
