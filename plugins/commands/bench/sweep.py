"""`frame bench sweep`: a grid of serve or throughput runs, and the Pareto front of throughput against latency.

Each point is a `frame bench` process of its own, so that memory and threads of one leave nothing to the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from frame.interfaces import Command
from frame.quoting import quoted
from frame.settings import ConfigError

from .output import add_output_flags, finish, progress_bar, stamp
from .plots import Plot, Series
from .report import Table
from .subcommand_parser import SubcommandParser

_MAX_POINTS = 1000
#: Subcommand → the fields (latency, throughput) that are drawn by default.
_AXES = {"serve": ("median_e2el_ms", "output_throughput"), "throughput": ("median_e2el_ms", "output_throughput")}
#: Numbers of a result that are settings, not measurements.
_SETTINGS = frozenset(("num_prompts", "burstiness", "request_rate", "max_concurrency", "block_size", "num_requests"))
#: Points that are labelled in the plot; more would hide each other.
_MAX_LABELS = 16


class SweepBench(Command):
    """Exits with 1 when no point could be measured."""

    help = "Run a grid of serve or throughput benchmarks and draw throughput against latency."
    examples = (
        "frame bench sweep serve --vary max-concurrency=1,4,16,64 --html pareto.html -- --num-prompts 200 --ignore-eos",
        "frame bench sweep throughput --vary max-num-seqs=8,32 --vary block-size=16,32 -- --num-prompts 100",
        "frame bench sweep serve --grid grid.yaml     # max-concurrency: [1, 4, 16]",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """What to run, what to vary, and after `--` the flags that all points share."""
        add = parser.add_argument
        add("target", choices=tuple(_AXES), help="The benchmark to run at each point.")
        add("--vary", action="append", default=[], metavar="FLAG=V1,V2", help="A flag and its values; may be repeated.")
        add("--grid", metavar="FILE", help="YAML: flag → list of values, or a list of such points (flag → value).")
        add("--latency-metric", metavar="NAME", help="Field of the x axis (default: median_e2el_ms).")
        add("--throughput-metric", metavar="NAME", help="Field of the y axis (default: output_throughput).")
        add_output_flags(parser)
        parser.epilog = "The words after -- are flags that every point gets."
        cast("SubcommandParser", parser).shares = True

    def run(self, arguments: argparse.Namespace) -> int:
        """Measures every point; one that fails is reported and left out."""
        points = grid(arguments.vary, arguments.grid)
        axes = _AXES[arguments.target]
        latency, throughput = arguments.latency_metric or axes[0], arguments.throughput_metric or axes[1]
        measured: list[dict[str, Any]] = []
        failures: list[str] = []
        with progress_bar(arguments, len(points), "points") as bar:
            for point in points:
                try:
                    results = measure(arguments.target, point, arguments.shared)
                    measured.append(_kept(point, results, latency, throughput))
                except ConfigError as error:
                    failures.append(f"{describe(point)}: {error}")
                    print(f"frame: {failures[-1]}", file=sys.stderr)
                bar.update()
        if not measured:
            raise ConfigError(f"none of {len(points)} points could be measured; the first: {failures[0]}")
        front = pareto([(one[latency], one[throughput]) for one in measured])
        for index, one in enumerate(measured):
            one["pareto"] = index in front
        results = {**stamp(), "target": arguments.target, "num_points": len(points), "num_failed": len(failures)}
        results |= {"latency_metric": latency, "throughput_metric": throughput, "points": measured}
        table = Table("Points", list(measured[0]), [list(one.values()) for one in measured])
        _print(measured)
        finish(arguments, "Sweep", results, [_plot(measured, latency, throughput)], [table])
        return 0


def grid(varied: Sequence[str], file: str | None) -> list[dict[str, str]]:
    """The points: every combination of the values, from flags, a file, or both. Raises `ConfigError`."""
    axes: dict[str, list[str]] = {}
    points: list[dict[str, str]] = [{}]
    if file:
        content = _read(file)
        if isinstance(content, list):
            points = [_point(entry, file) for entry in content]
        else:
            axes |= {_flag(name): _values(name, values) for name, values in content.items()}
    for item in varied:
        name, equals, values = item.partition("=")
        if not equals or not all(values.split(",")):
            raise ConfigError(f"--vary takes FLAG=VALUE,VALUE, got {quoted(item)}")
        axes[_flag(name)] = values.split(",")
    if not axes and points == [{}]:
        raise ConfigError("nothing varies: give --vary FLAG=VALUE,VALUE or --grid FILE")
    combined = [
        {**point, **dict(zip(axes, values, strict=True))}
        for point in points
        for values in itertools.product(*axes.values())
    ]
    if len(combined) > _MAX_POINTS:
        raise ConfigError(f"the grid has {len(combined)} points, at most {_MAX_POINTS} are run")
    return combined


def _read(file: str) -> Any:
    import yaml

    try:
        content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--grid {file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--grid {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, (dict, list)) or not content:
        raise ConfigError(f"--grid {file} must hold flags with lists of values, or a list of points")
    return content


def _point(entry: Any, file: str) -> dict[str, str]:
    if not isinstance(entry, dict):
        raise ConfigError(f"--grid {file}: a point must map flags to values, got {quoted(entry)}")
    return {_flag(name): _text(value) for name, value in entry.items()}


def _values(name: Any, values: Any) -> list[str]:
    if isinstance(values, list) and not values:
        raise ConfigError(f"the grid gives {name} no values")
    return [_text(value) for value in (values if isinstance(values, list) else [values])]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _flag(name: Any) -> str:
    return str(name).strip().lstrip("-").replace("_", "-")


def describe(point: Mapping[str, str]) -> str:
    """A point as a person would type it."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def command_of(target: str, point: Mapping[str, str], shared: Sequence[str], output: str) -> list[str]:
    """The process that measures a point: true is a bare switch, false its `--no-` form."""
    flags: list[str] = []
    for name, value in point.items():
        if value in ("true", "false"):
            flags.append(f"--{name}" if value == "true" else f"--no-{name}")
        else:
            flags.append(f"--{name}={value}")
    tail = ["--disable-tqdm", "--output-json", output]
    return [sys.executable, "-P", "-m", "frame", "bench", target, *shared, *flags, *tail]


def measure(target: str, point: Mapping[str, str], shared: Sequence[str]) -> dict[str, Any]:
    """Runs one point and returns its results; raises `ConfigError` with the process's last line when it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "point.json"
        command = command_of(target, point, shared, str(output))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not output.exists():
            raise ConfigError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def _kept(point: Mapping[str, str], results: Mapping[str, Any], latency: str, throughput: str) -> dict[str, Any]:
    settings = _SETTINGS | {name.replace("-", "_") for name in point}
    numbers = {
        name: value for name, value in results.items() if isinstance(value, (int, float)) and name not in settings
    }
    for name in (latency, throughput):
        if name not in numbers:
            raise ConfigError(f"the results have no number {quoted(name)}; there are: {', '.join(numbers)}")
    chosen = {name: numbers.pop(name) for name in (throughput, latency)}
    return {**point, **chosen, **numbers}


def pareto(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of (latency, throughput) pairs that no other beats in both (lower latency, higher throughput)."""
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1]))
    front: set[int] = set()
    best = -1.0
    for index in order:
        if points[index][1] > best:
            best = points[index][1]
            front.add(index)
    return front


def _plot(measured: Sequence[Mapping[str, Any]], latency: str, throughput: str) -> Plot:
    names = list(measured[0])[: list(measured[0]).index(throughput)]

    def series(name: str, chosen: Sequence[Mapping[str, Any]], style: Any) -> Series:
        ordered = sorted(chosen, key=lambda one: one[latency])
        notes = [describe({key: one[key] for key in names}) for one in ordered]
        points = [(one[latency], one[throughput]) for one in ordered]
        return Series(name, points, style, notes, labelled=len(measured) <= _MAX_LABELS)

    unit = " (ms)" if latency.endswith("_ms") else ""
    others = [one for one in measured if not one["pareto"]]
    return Plot(
        "Throughput against latency",
        latency.removesuffix("_ms") + unit,
        f"{throughput} (1/s)",
        [
            series("Pareto front", [one for one in measured if one["pareto"]], "line"),
            *([series("other points", others, "points")] if others else []),
        ],
    )


def _print(measured: Sequence[Mapping[str, Any]]) -> None:
    shown = [name for name in measured[0] if name == "pareto"]
    columns = [*list(measured[0])[:6], *shown]
    rows = [columns, *([_short(one[name]) for name in columns] for one in measured)]
    widths = [max(len(str(row[index])) for row in rows) for index in range(len(columns))]
    for row in rows:
        print("  ".join(f"{cell!s:>{width}}" for cell, width in zip(row, widths, strict=True)))


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "*" if value else ""
    return f"{value:,.5g}" if isinstance(value, float) else str(value)
