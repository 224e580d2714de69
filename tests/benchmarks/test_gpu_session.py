"""The parts of a lease: every GPU test is in one, and plans name parts."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def session() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_session", ROOT / "benchmarks/gpu_session.py")
    assert spec
    assert spec.loader
    module = sys.modules["gpu_session"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_of_tests_runs_every_file_once(session: ModuleType) -> None:
    commands = [part.command for part in session.PARTS if part.name in session.PLANS["tests"]]
    patterns = [word for command in commands for word in command.split() if word.startswith("tests/gpu/")]
    files = [file for pattern in patterns for file in ROOT.glob(pattern)]
    assert sorted(files) == sorted((ROOT / "tests/gpu").glob("test_*.py"))


def test_plans_name_parts(session: ModuleType) -> None:
    for plan in session.PLANS.values():
        assert set(plan) <= {part.name for part in session.PARTS}


def test_files_of_commands_exist(session: ModuleType) -> None:
    words = [word for part in session.PARTS for word in part.command.split()]
    missing = [word for word in words if word.startswith("benchmarks/") and not (ROOT / word).is_file()]
    assert not missing


MEET = """
import os, pathlib, time
here, end = pathlib.Path(__file__).parent, time.monotonic() + 30
(here / f"met-{os.environ['CUDA_VISIBLE_DEVICES']}").touch()
while len(found := sorted(file.name for file in here.glob("met-?"))) < 2 and time.monotonic() < end:
    time.sleep(0.01)
print(*found)
"""


def test_parts_run_beside_one_another_on_devices_of_their_own(session: ModuleType, tmp_path: Path) -> None:
    """Two parts of one device wait for each other's file; those of more devices run behind them, with both."""
    (tmp_path / "meet.py").write_text(MEET)
    meet = f"python {tmp_path / 'meet.py'}"
    both = "python -c \"import os; print(os.environ['CUDA_VISIBLE_DEVICES'])\""
    parts = [
        session.Part("first", meet, 60),
        session.Part("pair", both, 60, devices=2),
        session.Part("four", both, 60, devices=4),
        session.Part("second", meet, 60),
    ]
    options = argparse.Namespace(out=tmp_path, seconds=120, peer_python=sys.executable)
    session.run_all([(part, part.command) for part in parts], options, ["0", "1"])
    lines = json.loads((tmp_path / "session.json").read_text())
    assert {line["part"]: (line["status"], line["last line"]) for line in lines} == {
        "first": (0, "met-0 met-1"), "second": (0, "met-0 met-1"), "pair": (0, "0,1"), "four": (0, "0,1"),
    }  # fmt: skip
