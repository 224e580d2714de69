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


# plain integers: combining members of an IntFlag in each step takes longer than the work they stand for
#: The needs that change logits before the draw.
EDITS = int(Need.PENALTIES | Need.RULES | Need.PROCESSORS)

#: Everything beyond a temperature.
MORE = ~int(Need.RANDOM)

#: What a random row needs whole logits for where ranks divide the vocabulary.
WHOLE_ROW = int(Need.FILTER | Need.INVARIANT_PROCESSORS)

#: What allows a slot one row in a batch only.
ONE_ROW = int(Need.PROCESSORS | Need.INVARIANT_PROCESSORS)
