"""Prints the results of a benchmark, and writes them as JSON and as an HTML page."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from frame.settings import ConfigError

from .plots import Plot
from .report import Table, fact_table, page, shown, write_text


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of output files and of the progress bar."""
    group = parser.add_argument_group("output")
    group.add_argument("--output-json", metavar="FILE", help="Write the results as JSON.")
    group.add_argument("--html", metavar="FILE", help="Write the results with plots as one HTML file.")
    group.add_argument("--disable-tqdm", "--no-progress", action="store_true", help="Show no progress bar.")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` for a file that could not be written, before anything is measured."""
    saves = getattr(arguments, "save_result", False) or getattr(arguments, "save_detailed", False)
    files = [arguments.output_json, arguments.html, str(Path(arguments.result_dir) / "result") if saves else None]
    for name in filter(None, files):
        path = Path(name).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'permission denied'}")


def progress_bar(arguments: argparse.Namespace, total: int, what: str) -> Any:
    """A tqdm bar on stderr."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, disable=arguments.disable_tqdm, dynamic_ncols=True)


def stamp() -> dict[str, str]:
    """The date of a result, and the versions that made it."""
    return {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "frame_version": version("frame-llm"),
        "python": platform.python_version(),
    }


def write_json(path: str, results: Mapping[str, Any]) -> None:
    """Writes results as JSON; an infinite rate is the text "inf"."""
    write_text(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def print_figures(title: str, figures: Mapping[str, Any]) -> None:
    """Names and values on stdout, lists left out."""
    rows = {name: shown(value) for name, value in figures.items() if not isinstance(value, (list, dict))}
    width, right = max(map(len, rows)), max(map(len, rows.values()))
    print(f"{title}\n" + "\n".join(f"  {name:<{width}}  {value:>{right}}" for name, value in rows.items()))


def finish(
    arguments: argparse.Namespace,
    title: str,
    results: Mapping[str, Any],
    plots: Sequence[Plot] = (),
    tables: Sequence[Table] = (),
) -> None:
    """Prints `results`, and writes the files that were asked for."""
    print_figures(title, results)
    if arguments.output_json:
        write_json(arguments.output_json, results)
    if arguments.html:
        facts = {name: value for name, value in results.items() if not isinstance(value, (list, dict))}
        about = f"frame {version('frame-llm')}, {results.get('date', '')}"
        write_text(arguments.html, page(title, about, [*tables, fact_table("All figures", facts)], plots))
        print(f"page: {arguments.html}")
