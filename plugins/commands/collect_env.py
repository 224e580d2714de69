"""`frame collect-env`: the facts about this machine that a bug report needs. Prints no secret and sends nothing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from frame.interfaces import Command
from frame.settings import Registry

_PACKAGES = (
    "frame-llm", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "msgspec",
    "pluggy", "fastapi", "starlette", "uvicorn", "uvloop", "httptools", "prometheus-client", "llguidance",
    "opentelemetry-sdk", "flashinfer-python", "flash-attn", "nixl", "ray",
)  # fmt: skip
#: Variables that change what torch, CUDA or frame do; no other is read, since any may hold a secret.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH", "NCCL_DEBUG", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT", "HF_HOME", "HF_HUB_OFFLINE", "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM",
    "TRITON_INTERPRET", "TRITON_CACHE_DIR",
)  # fmt: skip
_GPU_FIELDS = "name,driver_version,memory.total,memory.used,compute_cap,pcie.link.gen.current"
_SECONDS = 20


class CollectEnvCommand(Command):
    """Prints sections of names and values; a value that cannot be found is printed as unknown."""

    help = "Print versions and hardware for a bug report."
    examples = ("frame collect-env", "frame collect-env --json > environment.json")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`--json`, and `--no-torch` for a machine on which importing it fails."""
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        parser.add_argument("--no-torch", action="store_true", help="Do not ask torch what it sees.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Prints the report."""
        report = collect(ask_torch=not arguments.no_torch)
        print(json.dumps(report, indent=1) if arguments.json else _text(report))
        return 0


def collect(*, ask_torch: bool = True) -> dict[str, dict[str, Any]]:
    """The report, section by section."""
    return {
        "system": _system(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "torch": _torch() if ask_torch else {},
        "GPUs": _gpus(),
        "plugins": _plugins(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _system() -> dict[str, Any]:
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    memory = next((line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "")
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "os": release.get("PRETTY_NAME", platform.system()),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": cpu.partition(":")[2].strip() or "unknown",
        "processors": len(os.sched_getaffinity(0)),
        "memory": memory.partition(":")[2].strip() or "unknown",
        "shared memory": _free("/dev/shm"),  # noqa: S108 - looked at, not written to
        "python": f"{platform.python_version()} ({sys.executable})",
        "virtual environment": str(sys.prefix != sys.base_prefix),
        "container": str(Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()),
    }


def _torch() -> dict[str, Any]:
    """What torch finds, asked in a process of its own, because a broken driver can end that process."""
    code = (
        "import json, torch; c = torch.cuda; a = c.is_available();"
        "print(json.dumps({'cuda build': str(torch.version.cuda), 'cuda available': a,"
        " 'cudnn': str(torch.backends.cudnn.version()) if a else 'unknown', 'threads': torch.get_num_threads(),"
        " 'devices': [c.get_device_name(i) for i in range(c.device_count())] if a else []}))"
    )
    done = _run([sys.executable, "-P", "-c", code])
    try:
        facts: dict[str, Any] = json.loads((done or "").strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"problem": "torch cannot be imported; `python -c 'import torch'` shows why"}
    return facts


def _gpus() -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {}
    listed = _run(["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"])
    if listed is None:
        return {"problem": "nvidia-smi fails"}
    return {f"GPU {index}": line.strip() for index, line in enumerate(listed.strip().splitlines())}


def _plugins() -> dict[str, Any]:
    registry = Registry.load()
    packages = sorted({(offer.package, offer.version) for offer in registry.offers})
    found: dict[str, Any] = dict(packages)
    return found | {failure.package: f"failed: {failure.reason}" for failure in registry.failures}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _free(path: str) -> str:
    try:
        return f"{shutil.disk_usage(path).total >> 20} MiB"
    except OSError:
        return "unknown"


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _text(report: Mapping[str, Mapping[str, Any]]) -> str:
    parts = []
    for section, facts in report.items():
        width = max(map(len, facts), default=0)
        lines = [f"  {name:<{width}}  {value}" for name, value in facts.items()] or ["  none"]
        parts.append("\n".join([section, *lines]))
    parts.append(f"{sum(1 for _ in distributions())} packages are installed; `pip freeze` lists them all.")
    return "\n\n".join(parts)
