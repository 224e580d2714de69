"""What a request needs beyond the argmax of its logits, as flags that a batch combines."""

from __future__ import annotations

from enum import IntFlag


class Need(IntFlag):
    """One flag for each part of the sampler that may have nothing to do."""

    RANDOM = 1
    FILTER = 2
    LOGPROBS = 4
    PENALTIES = 8
    RULES = 16
    PROCESSORS = 32
    INVARIANT_PROCESSORS = 64


# numbers: a flag costs more to combine than what it stands for, in each step
#: What changes logits before the draw.
EDITS = int(Need.PENALTIES | Need.RULES | Need.PROCESSORS)

#: All but a temperature.
MORE = ~int(Need.RANDOM)

#: What works on one row of a slot at a time.
ONE_ROW = int(Need.PROCESSORS | Need.INVARIANT_PROCESSORS)
