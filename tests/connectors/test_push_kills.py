"""Engines that die or stop while one writes to the other's device: see `tests/connectors/push_kills.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def killed(folder, count, seed=0):
    command = [sys.executable, "-m", "tests.connectors.push_kills", str(folder), str(count), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_engine_that_dies_in_mid_write_costs_no_token_and_no_block(tmp_path):
    found = killed(tmp_path, 2)
    assert found["wrong"] == []
    assert found["written"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_deaths_and_fifty_stops_cost_no_token_and_no_block(tmp_path):
    found = killed(tmp_path, 150, 1)
    assert found["wrong"] == []
    assert found["midway"] > 20
