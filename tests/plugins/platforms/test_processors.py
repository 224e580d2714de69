"""Affinity and the limits of control groups, and the threads that the CPU platform takes of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.links.processors import num_processors
from frame.plugins.platforms import cpu
from frame.testing import make_setup


@pytest.fixture(autouse=True)
def _many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GROUPS = {
    "no control groups": ({}, 64),
    "no limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
    "a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
    "less than one": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "5000 100000\n"}, 1),
    "a limit above": (
        {
            "proc/self/cgroup": "0::/a.slice/b.service\n",
            "sys/fs/cgroup/a.slice/cpu.max": "400000 100000",
            "sys/fs/cgroup/a.slice/b.service/cpu.max": "max 100000",
        },
        4,
    ),
    "another's view of the path": ({"proc/self/cgroup": "0::/docker/1f", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    "version 1": (
        {
            "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        },
        2,
    ),
    "nonsense": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "many\n"}, 64),
}


@pytest.mark.parametrize("case", GROUPS)
def test_limits(tmp_path: Path, case: str) -> None:
    files, expected = GROUPS[case]
    assert num_processors(_write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("settings", "variables", "expected"),
    [({}, {}, [3]), ({}, {"OMP_NUM_THREADS": "8"}, []), ({"num_threads": 7}, {}, [7])],
    ids=["as many as processors", "the environment decides", "the setting decides"],
)
def test_threads(
    settings: dict[str, int], variables: dict[str, str], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cpu, "num_processors", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    cpu.CpuPlatform(make_setup("platform", config=from_flat({"model": "", **settings})))
    assert taken == expected
