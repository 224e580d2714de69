"""One table from raw results of `offline_gpu.py`: each run by frame and by its peer, their ratio, and the floor.

    python benchmarks/table.py FILE.json …

Files name their engine; of one run measured several times by an engine the best is taken. Ratios are of tokens out per
second, or of tokens in where a run asks for one token a request; the floor is that of `floors.py`. A ratio below its
target is marked "missed". What only one of the engines has run has no ratio. Files of different devices are refused,
since their ratios would mean nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from floors import Shape, floor
from offline_gpu import LLAMA_MIXED, MODELS, RAGGED, SHARED, SHORT, STATES, Run

#: By engine, model and run the figures of `offline_gpu.py`.
Results = dict[str, dict[tuple[str, str], dict[str, float]]]
#: By model and run the least ratio to the peer that frame is held to.
TARGETS = {
    ("qwen3-0.6b", str(RAGGED)): 1.12,
    ("qwen3-14b", str(RAGGED)): 1.12,
    ("llama-8b", str(LLAMA_MIXED)): 1.12,
    ("llama-8b", str(SHARED)): 2.3,
    ("gpt-oss-20b", str(SHORT[1])): 1.1,
    ("gpt-oss-20b", str(LLAMA_MIXED)): 1.1,
    ("deepseek-v2-lite", str(LLAMA_MIXED)): 1.1,
    ("mamba2-2.7b", str(STATES)): 1.1,
}


def read(files: Iterable[Path]) -> tuple[Results, list[str]]:
    """(results, what they are of); raises ValueError for files of several devices."""
    results: Results = {}
    about: dict[str, None] = {}
    devices = set[str]()
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        devices.add(content["device"])
        versions = ", ".join(f"{name} {content[name]}" for name in ("torch", "triton"))
        about[f"{content['engine']} {content['engine_version']}, {versions}, {content['date']}"] = None
        found = results.setdefault(content["engine"], {})
        for line in content["results"]:
            key = (line["model"], line["run"])
            if key not in found or line["seconds"] < found[key]["seconds"]:
                found[key] = line
    if len(devices) != 1:
        raise ValueError(f"results of one device make a table, not of {', '.join(sorted(devices)) or 'none'}")
    return results, [*devices, *about]


def rows(results: Results, ours: str = "frame") -> list[list[str]]:
    """The cells of each line, by the order of the models' runs."""
    theirs = next((engine for engine in results if engine != ours), "")
    lines = []
    for model, (config, _, runs) in MODELS.items():
        start = [results.get(engine, {}).get((model, "start")) for engine in (ours, theirs)]
        for run in runs:
            measured = [results.get(engine, {}).get((model, str(run))) for engine in (ours, theirs)]
            if any(measured):
                lines.append([model, str(run), *_cells(measured, run, config), _target(model, run, measured)])
        if any(start):
            told = ["" if one is None else f"{one['seconds']:.1f} s" for one in start]
            ratio = f"{start[1]['seconds'] / start[0]['seconds']:.1f}" if start[0] and start[1] else ""
            lines.append([model, "start", told[1], told[0], ratio, "", "", ""])
    return lines


def _cells(measured: list[Any], run: Run, config: dict[str, Any]) -> list[str]:
    tokens = "tokens_in" if run.tokens_out == (1, 1) else "tokens_out"
    rates = [None if one is None else one[tokens] / one["seconds"] for one in measured]
    ours, theirs = rates
    told = [
        "" if theirs is None else f"{theirs:,.0f}",
        "" if ours is None else f"{ours:,.0f}",
        f"{ours / theirs:.2f}" if ours and theirs else "",
    ]
    if not Shape.is_known(config):
        return [*told, "", ""]
    *parts, out = floor(config, run, 1)
    least = (run.requests * run.tokens_in[0] if tokens == "tokens_in" else out) / sum(parts)
    return [
        *told,
        f"{least:,.0f}",
        f"{ours / least:.2f}" if ours else "",
    ]


def _target(model: str, run: Run, measured: list[Any]) -> str:
    """The ratio asked for, and whether it was missed."""
    target = TARGETS.get((model, str(run)))
    if target is None:
        return ""
    ours, theirs = (one and one["seconds"] for one in measured)
    return f"≥ {target}" + (", missed" if ours and theirs and theirs / ours < target else "")


def markdown(results: Results, about: Iterable[str]) -> str:
    """The table with a line on what it is of."""
    peer = next((engine for engine in results if engine != "frame"), "peer")
    heads = [
        "model",
        "run",
        f"{peer}, tokens/s",
        "frame, tokens/s",
        "ratio",
        "floor, tokens/s",
        "of the floor",
        "target",
    ]
    lines = [heads, ["---"] * len(heads), *rows(results)]
    return "\n".join([" · ".join(about), "", *(f"| {' | '.join(line)} |" for line in lines)])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="A table from results of offline_gpu.py.")
    parser.add_argument("files", nargs="+", type=Path)
    results, about = read(parser.parse_args().files)
    print(markdown(results, about))


if __name__ == "__main__":
    main()
