"""Joins what several engines say of themselves into what one would say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from frame.core.interfaces.engine import EngineStats
from frame.transfers.measures import is_share

#: Fields of `EngineStats` that are not added up.
_MEANS, _OF_ONE = ("kv_usage",), ("rank", "problem", "ranks")
_LARGEST = ("step_seconds", "expert_balancedness", "num_expert_placements", "num_expert_copies")


def joined_stats(ranks: Sequence[EngineStats]) -> EngineStats:
    """Sums over engines; the share of the KV cache in use is that of all blocks, `step_seconds` the longest step.

    Of a connector's gauges that are shares, by their names, it is the mean over the engines that have one.
    """
    joined = EngineStats(ranks=list(ranks))
    for name in EngineStats.__struct_fields__:
        if name in _OF_ONE:
            continue
        values = [getattr(one, name) for one in ranks]
        if name in _MEANS:
            blocks = [one.num_blocks for one in ranks]
            total = sum(value * count for value, count in zip(values, blocks, strict=True))
            setattr(joined, name, total / max(1, sum(blocks)))
        else:
            setattr(joined, name, max(values) if name in _LARGEST else _sum(values))
    for name in filter(is_share, joined.connector_gauges):
        joined.connector_gauges[name] /= sum(name in one.connector_gauges for one in ranks)
    return joined


def joined_history(answers: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Samples of all engines by the second; an engine that took none in a second counts with its last one before."""
    newest: list[dict[str, Any] | None] = [None] * len(answers)
    joined: list[dict[str, Any]] = []
    events = sorted((sample["time"], place) for place, samples in enumerate(answers) for sample in samples)
    left = [iter(samples) for samples in answers]
    for time, place in events:
        newest[place] = next(left[place])
        known = [_stats(sample) for sample in newest if sample is not None]
        sample = {"time": time, **msgspec.structs.asdict(joined_stats(known)), "ranks": []}
        if joined and time - joined[-1]["time"] < 0.5:
            joined.pop()  # of another engine at nearly the same time
        joined.append(sample)
    return joined


def joined_answers(answers: Sequence[Any]) -> Any:
    """The answers of all engines to one call: lists one after the other, counts added, True where all said so."""
    first = answers[0]
    if isinstance(first, bool):
        return all(answers)
    if isinstance(first, (int, float)):
        return sum(answers)
    if isinstance(first, list):
        return [item for answer in answers for item in answer]
    return first


def _stats(sample: dict[str, Any]) -> EngineStats:
    return msgspec.convert({name: value for name, value in sample.items() if name != "time"}, EngineStats)


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: sum(one.get(key, 0) for one in values) for key in dict.fromkeys(k for one in values for k in one)}
    if isinstance(values[0], list):
        longest = max(map(len, values))
        return [sum(one[place] for one in values if place < len(one)) for place in range(longest)]
    return sum(values)
