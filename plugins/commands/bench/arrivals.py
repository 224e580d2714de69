"""The times at which a benchmark sends its requests."""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, burstiness: float, draw: random.Random) -> list[float]:
    """Seconds after the start at which each of `count` requests is sent, rising; all 0 for an infinite rate.

    Gaps follow a gamma distribution of shape `burstiness` and mean 1 / `rate`: 1 is a Poisson process, less comes in
    bursts, more is steadier. They are scaled so that the last request leaves at `count` / `rate`, so that every seed
    asks for exactly the rate that was named.
    """
    if math.isinf(rate) or not count:
        return [0.0] * count
    now, times = 0.0, []
    for _ in range(count):
        now += draw.gammavariate(burstiness, 1.0 / (rate * burstiness))
        times.append(now)
    scale = count / rate / now if now > 0 else 0.0
    return [time * scale for time in times]
