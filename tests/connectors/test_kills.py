"""Engines that die by SIGKILL while one reads the other's blocks: see `tests/connectors/kills.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.connectors.engine_kills import kills

ROOT = Path(__file__).parents[2]


def killed(folder, count, *connectors, seed=0):
    command = [sys.executable, "-m", "tests.connectors.kills", str(folder), str(count), str(seed), *connectors]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_engine_that_dies_while_blocks_travel_costs_no_token_and_no_block(tmp_path):
    found = killed(tmp_path, 2, "peer", "disk")
    assert {name: one["wrong"] for name, one in found.items()} == {"peer": [], "disk": []}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("connector", ["disk", "peer", "nixl", "multi"])
def test_a_hundred_deaths_while_blocks_travel_cost_no_token_and_no_block(tmp_path, connector):
    if connector in ("nixl", "multi"):
        pytest.importorskip("nixl")
    found = killed(tmp_path, 100, connector)[connector]
    assert found["wrong"] == []
    assert found["midway"] > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("connector", ["nixl", "push"])
def test_deaths_of_engines_with_a_model_cost_no_token_no_request_and_no_block(tmp_path, connector):
    if connector == "nixl":
        pytest.importorskip("nixl")
    found = kills(tmp_path, connector, 8, pairs=1, platform="cpu")
    assert (found["kills"], found["wrong"], found["lost"], found["left"]) == (8, [], [], [])
    assert found["midway"] > 0
