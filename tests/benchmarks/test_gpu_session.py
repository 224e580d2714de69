"""The parts of a lease: every GPU test is in one, and plans name parts."""

from __future__ import annotations

import importlib.util
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
