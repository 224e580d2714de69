"""How many processors this process may use: its affinity, and the CPU limits of the control groups that it is in."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def num_processors(root: Path = Path("/")) -> int:
    """At least 1. A limit of two and a half processors counts as three. `root` holds proc and sys."""
    limits = [math.ceil(limit) for limit in _limits(root)]
    return max(1, min([len(os.sched_getaffinity(0)), *limits]))


def _limits(root: Path) -> Iterator[float]:
    """Processors of each limited group that this process is in, of both versions of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, read = root / "sys/fs/cgroup", _quota_of_version_2
        elif "cpu" in controllers.split(","):
            mount, read = root / "sys/fs/cgroup" / controllers, _quota_of_version_1
        else:
            continue
        group = mount / path.strip("/")
        for folder in (group, *group.parents):
            if (limit := read(folder)) is not None:
                yield limit
            if folder == mount:
                break


def _quota_of_version_2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_of_version_1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
    except (OSError, ValueError, ZeroDivisionError):
        return None
