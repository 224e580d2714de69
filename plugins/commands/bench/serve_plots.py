"""The plots and the table of a serving benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .metrics import METRICS, percentile, times, tokens_by_second
from .plots import Plot, Series, distribution
from .record import MeasuredRequest
from .report import Table


def serve_plots(records: Sequence[MeasuredRequest], metrics: Sequence[str]) -> list[Plot]:
    """A distribution of each metric, tokens over time, and the time to the first token of requests as they came."""
    values = times(records)
    start = min(record.started for record in records)
    plots = [
        Plot(
            METRICS[name].capitalize(),
            f"{name.upper()} (ms)",
            "requests up to it (%)" if name != "itl" else "gaps up to it (%)",
            [Series(name, [(value * 1000, share) for value, share in distribution(values[name])], "step")],
        )
        for name in metrics
    ]
    counts = tokens_by_second(records, start)
    plots.append(
        Plot(
            "Output tokens over time",
            "time since the start (s)",
            "output tokens (1/s)",
            [Series("tokens", [(second + 0.5, float(count)) for second, count in enumerate(counts)])],
        )
    )
    done = sorted((record for record in records if record.success), key=lambda record: record.started)
    arrivals = [(record.started - start, record.ttft * 1000) for record in done]
    notes = [f"{record.prompt_len} prompt tokens, {record.output_len} output tokens" for record in done]
    plots.append(
        Plot(
            "Time to first token by arrival",
            "sent after (s)",
            "TTFT (ms)",
            [Series("requests", arrivals, "points", notes)],
        )
    )
    return plots


def metric_table(records: Sequence[MeasuredRequest], metrics: Sequence[str], percents: Sequence[float]) -> Table:
    """Mean and percentiles of every metric, in milliseconds."""
    values = times(records)
    rows = []
    for name in metrics:
        found = values[name]
        mean = statistics.fmean(found) if found else 0.0
        rows.append(
            [f"{METRICS[name]} ({name})", *(v * 1000 for v in (mean, *(percentile(found, p) for p in percents)))]
        )
    return Table("Times (ms)", ("metric", "mean", *(f"p{percent:g}" for percent in percents)), rows)
