"""Benchmarks of attention and adapters on a machine without a GPU: results are compared, by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.kernels.{name}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT)


def results(path: Path, name: str, *arguments: str) -> list[dict[str, Any]]:
    """What the command writes."""
    ended = run(name, *arguments, "--json", str(path / "x.json"))
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads((path / "x.json").read_text())
    assert found["device"] == "cpu"
    return found["products"] if "products" in found else found["cases"]


@pytest.mark.matrix
def test_few_tokens_are_compared_whole_and_in_parts(tmp_path: Path) -> None:
    short, long = results(tmp_path, "few_tokens", "--cases", "1x40x5,2x600x3")
    assert (short["rows"], short["context"], short["new"], short["splits"]) == (1, 40, 5, 1)
    assert long["splits"] == 2
    assert all(one[f"{name} off"] < 1e-5 for one in (short, long) for name in ("whole", "parts"))


@pytest.mark.matrix
def test_decodes_are_compared_over_both_caches(tmp_path: Path) -> None:
    (found,) = results(tmp_path, "decode_fp8", "--cases", "2x40")
    assert (found["rows"], found["length"]) == (2, 40)
    assert found["16 bits off"] < 1e-5
    assert found["8 bits off"] < 1e-5


@pytest.mark.matrix
def test_what_adapters_add_is_compared_for_each_product(tmp_path: Path) -> None:
    found = results(tmp_path, "adapters", "--rows", "5", "--slots", "3", "--rank", "4")
    assert [one["product"] for one in found] == ["query, key, value", "output", "gate and up", "down"]
    assert all(one["off"] < 1e-5 for one in found)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("few_tokens", ("--cases", "1x40"), "a case is ROWSxBEFORExNEW, all of them at least 1; got '1x40'"),
        ("decode_fp8", ("--cases", "2x0"), "a case is ROWSxTOKENS, all of them at least 1; got '2x0'"),
        ("adapters", ("--slots", "0"), "--rows, --slots, --rank and --layers must be at least 1, got 64, 0, 16, 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name: str, arguments: tuple[str, ...], said: str) -> None:
    ended = run(name, *arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
