"""What the encoder of a model reads in a step; without an encoder, nothing.

The encoder runs in the step that adds a request, on all tokens of its encoder prompt. Knows no KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...interfaces.attention import GroupBatch
from ...interfaces.step import StepPlan

#: Instead of the KV group of a plan: that of layers over the tokens of the step, or of the encoder, that keep nothing.
OWN_TOKENS, ENCODER_TOKENS = -1, -2


class NoEncoder:
    """Every token is the decoder's."""

    def write(self, plan: StepPlan) -> None:
        """Takes what a step's new requests bring for the encoder; called in "writes"."""

    def batches(self, plan_groups: Sequence[int], slots: Tensor, found: list[GroupBatch]) -> list[GroupBatch]:
        """The rows as each plan sees them, from those of the decoder; `slots` int32 [padded rows] are theirs."""
        del plan_groups, slots
        return found

    def given(self) -> tuple[Tensor, Tensor] | None:
        """`ModelInputs.encoder_ids` and `.encoder_positions`."""
        return None
