from __future__ import annotations

import json

import pytest

from benchmarks.soak import soak

SERVE = ["--", "--num-threads", "1"]


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_some_seconds_of_everything_lose_nothing() -> None:
    few = ["--seconds", "3", "--kill-every", "0", "--apis", "1", "--every", "5"]  # of each kind and length
    report = soak([*few, *SERVE, "--no-standby-engine"])
    assert report["ok"], json.dumps(report, indent=1)
    assert report["equal"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_with_kills_loses_nothing() -> None:
    report = soak(["--seconds", "60", "--kill-every", "8", *SERVE])
    assert report["ok"], json.dumps(report, indent=1)
    assert any(name.startswith("kills of") for name in report)
