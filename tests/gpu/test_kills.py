"""Engines on two GPUs, or on one, that die by SIGKILL while KV travels: see `tests/connectors/engine_kills.py`."""

from __future__ import annotations

import pytest

from tests.connectors.engine_kills import kills

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("connector", ["nixl", "push"])
def test_a_hundred_deaths_cost_no_token_no_request_and_no_block(connector, tmp_path):
    if connector == "nixl":
        pytest.importorskip("nixl")
    found = kills(tmp_path, connector, 100, pairs=4, platform="cuda")
    assert (found["kills"], found["wrong"], found["lost"], found["left"]) == (100, [], [], [])
    assert found["midway"] > 30
