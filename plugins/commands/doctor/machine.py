"""Finds the device that a prediction is made for, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace

from frame.settings import ConfigError

_SECONDS = 20


@dataclass(frozen=True)
class Device:
    """`kind` is "cpu" or "cuda"; sizes are in bytes. `stated`: the sizes were given on the command line."""

    kind: str
    name: str
    total_bytes: int
    free_bytes: int
    stated: bool = False


def find_devices(platform: str, memory_gib: float | None, count: int) -> list[Device]:
    """As `find_device`, `count` alike ones where the size is stated or several workers share it, else all GPUs."""
    first = find_device(platform, memory_gib)
    if first.kind == "cpu" or first.stated or count == 1:
        return [first] * count
    return [replace(one, name=f"GPU {index} ({one.name})") for index, one in enumerate(_gpus())]


def find_device(platform: str, memory_gib: float | None) -> Device:
    """The device of `--platform` ("auto": a GPU if there is one), with `memory_gib` in place of its own memory.

    Raises `ConfigError` for a GPU that is asked for without a size and not there, and for platforms of other packages.
    """
    if platform not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"frame doctor knows the memory rules of cpu and cuda, not those of platform {platform!r}")
    gpu = None if platform == "cpu" else next(iter(_gpus()), None)
    if memory_gib is not None:
        size = int(memory_gib * (1 << 30))
        kind = "cuda" if platform == "cuda" or gpu is not None else "cpu"
        return Device(kind, f"a {kind} device of {memory_gib:g} GiB", size, size, stated=True)
    if gpu is not None:
        return gpu
    if platform == "cuda":
        raise ConfigError("nvidia-smi finds no GPU; say how much memory one has with --memory-gib")
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    return Device("cpu", "this machine's memory", total, free)


def _gpus() -> list[Device]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        if not visible:
            return []
        query.append(f"--id={visible}")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=False)
        found = [line.split(", ") for line in done.stdout.strip().splitlines()]
        return [Device("cuda", name, int(total) << 20, int(free) << 20) for name, total, free in found]
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []
