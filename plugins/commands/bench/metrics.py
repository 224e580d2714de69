"""Computes the figures of a run from its records, under the names that `vllm bench serve` writes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from frame.quoting import quoted
from frame.settings import ConfigError

from .record import MeasuredRequest

#: The measured times, by their short names.
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, interpolated between the two nearest ranks as numpy does; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def times(records: Sequence[MeasuredRequest]) -> dict[str, list[float]]:
    """Every metric's values, in seconds, of the requests that succeeded."""
    done = [record for record in records if record.success]
    return {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.itls],
        "e2el": [record.latency for record in done],
    }


def summary(values: Sequence[float], name: str, percents: Sequence[float]) -> dict[str, float]:
    """`mean_NAME_ms`, `median_NAME_ms`, `std_NAME_ms` and `pX_NAME_ms`; `values` are in seconds."""
    found = {
        f"mean_{name}_ms": statistics.fmean(values) if values else 0.0,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": statistics.pstdev(values) if values else 0.0,
        **{f"p{percent:g}_{name}_ms": percentile(values, percent) for percent in percents},
    }
    return {key: value * 1000 for key, value in found.items()}


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]` → limits in milliseconds. Raises `ConfigError`."""
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput takes ttft:MS, tpot:MS and e2el:MS, got {quoted(pair)}")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if not 0 <= limits[name] < math.inf:
            raise ConfigError(f"--goodput: {name} must be a number of milliseconds, got {quoted(value)}")
    return limits


def is_good(record: MeasuredRequest, limits: Mapping[str, float]) -> bool:
    """Whether a request succeeded within every limit (milliseconds)."""
    took = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return record.success and all(took[name] * 1000 <= limit for name, limit in limits.items())


def tokens_by_second(records: Sequence[MeasuredRequest], start: float) -> list[int]:
    """Tokens that arrived in each second after `start`, one for each arrival that was recorded."""
    counts: Counter[int] = Counter()
    for record in records:
        if record.success:
            now = record.started + record.ttft
            counts[int(now - start)] += 1
            for gap in record.itls:
                now += gap
                counts[int(now - start)] += 1
    return [counts[second] for second in range(max(counts, default=-1) + 1)]


def most_concurrent(records: Sequence[MeasuredRequest]) -> int:
    """The most requests that were being answered at one moment."""
    changes = [(record.started, 1) for record in records]
    changes += [(record.started + record.latency, -1) for record in records]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def serve_figures(
    records: Sequence[MeasuredRequest],
    duration: float,
    *,
    metrics: Sequence[str],
    percents: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """All aggregate fields of a run of `duration` seconds."""
    done = [record for record in records if record.success]
    start = min((record.started for record in records), default=0.0)
    prompt_tokens, output_tokens = sum(one.prompt_len for one in done), sum(one.output_len for one in done)
    values = times(records)
    good = sum(is_good(record, goodput) for record in records)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if goodput else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": max(tokens_by_second(records, start), default=0),
        "max_concurrent_requests": most_concurrent(records),
    }
    for name in metrics:
        figures |= summary(values[name], name, percents)
    return figures
