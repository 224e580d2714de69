"""`frame bench startup`: times starts of an engine, cold and warm, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from frame.interfaces import Command
from frame.settings import ConfigError, FlagParser, add_config_flags, find_folder

from .metrics import percentile
from .offline import engine_config
from .output import add_output_flags, finish, progress_bar, stamp
from .plots import Plot, Series
from .report import Table

_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
_PERCENTS = (10, 25, 50, 75, 90, 99)


class StartupBench(Command):
    """A cold start finds neither compiled kernels nor cached weights; a warm one finds those of an earlier start."""

    help = "Time cold and warm starts of an engine, stage by stage, up to its first token."
    examples = (
        "frame bench startup --num-iters-cold 2 --num-iters-warm 3",
        "frame bench startup /models/qwen3 --output-json startup.json",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """vLLM's flags, then the engine's."""
        add = parser.add_argument
        add("--num-iters-cold", type=int, default=3, metavar="N", help="Cold starts to measure (default: %(default)s).")
        add(
            "--num-iters-warmup",
            type=int,
            default=1,
            metavar="N",
            help="Unmeasured starts before warm ones (default: 1).",
        )
        add("--num-iters-warm", type=int, default=3, metavar="N", help="Warm starts to measure (default: %(default)s).")
        add(
            "--timeout-sec",
            type=float,
            default=1800.0,
            metavar="S",
            help="Seconds that a start may take (default: 1800).",
        )
        add_output_flags(parser)
        add_config_flags(cast("FlagParser", parser))

    def run(self, arguments: argparse.Namespace) -> int:
        """Measures and reports; raises `ConfigError` with the engine's own sentence when it does not start."""
        if min(arguments.num_iters_cold, arguments.num_iters_warm, arguments.num_iters_warmup) < 0:
            raise ConfigError("--num-iters-cold, --num-iters-warm and --num-iters-warmup must be at least 0")
        if not arguments.num_iters_cold + arguments.num_iters_warm:
            raise ConfigError("nothing to time: --num-iters-cold and --num-iters-warm are both 0")
        config = engine_config(arguments)
        settings = config.model_dump(mode="json")
        folder = find_folder(config.model.model, config.model.revision)
        total = arguments.num_iters_cold + arguments.num_iters_warmup + arguments.num_iters_warm
        runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
        with progress_bar(arguments, total, "starts") as bar, tempfile.TemporaryDirectory() as scratch:
            starts = ["cold"] * arguments.num_iters_cold
            if arguments.num_iters_warm:
                starts += ["warm-up"] * arguments.num_iters_warmup + ["warm"] * arguments.num_iters_warm
            for index, kind in enumerate(starts):
                if kind == "cold":
                    drop_from_file_cache(folder)
                caches = Path(scratch) / (f"cold{index}" if kind == "cold" else "warm")
                found = start_once(settings, caches, arguments.timeout_sec)
                runs.setdefault(kind, []).append(found)
                bar.update()
        results = {
            **stamp(),
            "model_id": next(iter(config.model.served_model_name), config.model.model) or "demo",
            **_figures("cold", runs["cold"]),
        }
        results |= _figures("warm", runs["warm"])
        kept = {kind: runs[kind] for kind in ("cold", "warm") if runs[kind]}
        finish(arguments, "Start-up (s)", results, [_plot(kept)], [_stages(kept)])
        return 0


def drop_from_file_cache(folder: Path) -> None:
    """Asks the kernel to drop the weights from its file cache, so that a cold start reads them from the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start_once(settings: Mapping[str, Any], caches: Path, timeout: float) -> dict[str, Any]:
    """One start in a process of its own: `stages` (name, seconds), `ready` and `first_token` since the command."""
    environment = dict(os.environ)
    for name in _CACHES:
        folder = caches / name.lower()
        folder.mkdir(parents=True, exist_ok=True)
        environment[name] = str(folder)
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "start.json"
        command = [sys.executable, "-P", "-m", "frame.plugins.commands.bench.start_process", str(output)]
        message = json.dumps({"began": time.time(), "config": settings})
        try:
            done = subprocess.run(
                command, input=message, capture_output=True, text=True, timeout=timeout, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"a start took more than --timeout-sec {timeout:g}") from None
        if done.returncode or not output.exists():
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ConfigError(f"the engine does not start: {last}")
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def _figures(kind: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not runs:
        return {}
    ready = [run["ready"] for run in runs]
    return {
        f"avg_{kind}_startup_time": statistics.fmean(ready),
        f"{kind}_startup_times": ready,
        f"{kind}_startup_percentiles": {str(percent): percentile(ready, percent) for percent in _PERCENTS},
        f"avg_{kind}_first_token_time": statistics.fmean(run["first_token"] for run in runs),
        f"{kind}_stages": {name: statistics.fmean(values) for name, values in _by_stage(runs).items()},
    }


def _by_stage(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, seconds in run["stages"]:
            found.setdefault(name, []).append(seconds)
    return found


def _stages(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    kinds = list(runs)
    means = {kind: {name: statistics.fmean(values) for name, values in _by_stage(runs[kind]).items()} for kind in kinds}
    names = list(dict.fromkeys(name for kind in kinds for name in means[kind]))
    return Table(
        "Stages (s)", ("stage", *kinds), [[name, *(means[kind].get(name) for kind in kinds)] for name in names]
    )


def _plot(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Plot:
    series = []
    for kind, found in runs.items():
        points = [(float(index), run["ready"]) for index, run in enumerate(found, start=1)]
        series.append(Series(kind, points, "points"))
    return Plot("From the command to a ready engine", "start", "time (s)", series)
