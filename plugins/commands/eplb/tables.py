"""The results of a replay as a table, as JSON and as a page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from statistics import fmean
from typing import Any

from frame.interfaces import TraceHeader

from ..bench.output import stamp, write_json
from ..bench.plots import Plot, Series
from ..bench.report import Table, page, shown, write_text
from .replay import Case

_COLUMNS = (
    "policy", "ranks", "nodes", "slots", "balance", "lowest", "copies/layer", "GiB/placement", "ms/placement",
)  # fmt: skip
_MOST_SERIES = 6


def row(case: Case, num_layers: int) -> tuple[Any, ...]:
    """The figures of a case, each a mean over the trace; the first window, which nothing was known of, left out."""
    known = case.balance[1:] or case.balance
    return (
        case.policy,
        case.shape.num_ranks,
        case.shape.num_nodes,
        case.shape.num_slots,
        round(fmean(known), 3),
        round(min(known), 3),
        round(fmean(case.copies) / num_layers, 1) if case.copies else 0.0,
        round(fmean(case.copied_bytes) / 2**30, 2) if case.copies else 0.0,
        round(1e3 * fmean(case.seconds), 1) if case.seconds else 0.0,
    )


def write(cases: Sequence[Case], header: TraceHeader, json_file: str | None, html_file: str | None) -> None:
    """Prints the table, and writes the files that were asked for."""
    rows = [row(case, header.num_layers) for case in cases]
    cells = [_COLUMNS, *([shown(cell) for cell in one] for one in rows)]
    widths = [max(len(one[place]) for one in cells) for place in range(len(_COLUMNS))]
    for one in cells:
        pairs = zip(one[1:], widths[1:], strict=True)
        print(" ".join([f"{one[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in pairs)]))
    if json_file:
        write_json(json_file, {**stamp(), "cases": [_facts(case, header.num_layers) for case in cases]})
    if html_file:
        about = f"frame {version('frame-llm')}, {header.num_layers} layers of {header.num_experts} experts"
        table = Table("Means over the windows", _COLUMNS, rows)
        write_text(html_file, page("Expert balance", about, [table], _plots(cases)))
        print(f"page: {html_file}")


def _facts(case: Case, num_layers: int) -> dict[str, Any]:
    named = dict(zip(_COLUMNS, row(case, num_layers), strict=True))
    return {**named, "balance_by_window": case.balance, "copies": case.copies, "copied_bytes": case.copied_bytes}


def _plots(cases: Sequence[Case]) -> list[Plot]:
    """Balance, copies and bytes over time, for cases of each shape; then balance over ranks."""
    shapes = list(dict.fromkeys(case.shape for case in cases))
    plots = []
    for shape in shapes:
        own = [case for case in cases if case.shape == shape][:_MOST_SERIES]
        title = f"{shape.num_ranks} ranks, {shape.num_nodes} nodes, {shape.num_slots} slots"
        balance = [Series(case.policy, list(enumerate(case.balance))) for case in own]
        moved = [Series(case.policy, [(n, size / 2**30) for n, size in enumerate(case.copied_bytes)]) for case in own]
        copied = [Series(case.policy, [(n, float(count)) for n, count in enumerate(case.copies)]) for case in own]
        plots.append(Plot(f"Balance, {title}", "window", "mean load / largest", balance))
        plots.append(
            Plot(f"Weights moved, {title}", "placement", "GiB", moved)
            if shape.expert_bytes
            else Plot(f"Experts moved, {title}", "placement", "experts", copied)
        )
    if len({shape.num_ranks for shape in shapes}) > 1:
        plots.append(Plot("Balance by ranks", "ranks", "mean load / largest", _by_ranks(cases)))
    return plots


def _by_ranks(cases: Sequence[Case]) -> list[Series]:
    policies = list(dict.fromkeys(case.policy for case in cases))[:_MOST_SERIES]
    points = {
        name: [
            (float(case.shape.num_ranks), fmean(case.balance[1:] or case.balance), f"{case.shape.num_slots} slots")
            for case in sorted(cases, key=lambda case: case.shape.num_ranks)
            if case.policy == name
        ]
        for name in policies
    }
    return [
        Series(name, [(x, y) for x, y, _ in found], "points", [note for *_, note in found])
        for name, found in points.items()
    ]
