from __future__ import annotations

import json

import pytest

from benchmarks.soak import soak

SERVE = ["--", "--num-threads", "1", "--max-engine-restarts", "20"]


def test_ten_seconds_of_everything_lose_nothing() -> None:
    report = soak(["--seconds", "10", "--kill-every", "0", *SERVE])
    assert report["ok"], json.dumps(report, indent=1)
    assert report["equal"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_half_a_minute_with_kills_loses_nothing() -> None:
    report = soak(["--seconds", "40", "--kill-every", "8", *SERVE])
    assert report["ok"], json.dumps(report, indent=1)
    assert report["kills"] >= 1
