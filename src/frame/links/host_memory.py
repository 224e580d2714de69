"""The memory of this machine, or of the container in which the process runs."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def host_memory() -> tuple[int, int]:
    """Bytes of memory that this machine, or this process' container, has in all, and that may still be taken."""
    with open("/proc/meminfo") as file:
        sizes = dict(line.split(":") for line in file)
    total, available = (int(sizes[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    for limit_file, usage_file, stat_file in _CGROUPS:
        try:
            limit, usage = int(Path(limit_file).read_text()), int(Path(usage_file).read_text())
            cached = dict(line.split() for line in Path(stat_file).read_text().splitlines())
        except (OSError, ValueError):
            continue  # there is none, or it is "max"
        total = min(total, limit)
        available = min(available, max(0, limit - usage + int(cached.get("inactive_file", 0))))
    return total, available
