"""The embeddings that requests bring in the place of tokens, as one step computes them.

They come with the plan and are kept for one step: a request that is computed again has them planned again. Where none
may come, `NoPromptEmbeds` has no memory and launches nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...interfaces.engine import PromptEmbeds as Rows
from ...interfaces.step import EMBEDS, StepPlan
from ...interfaces.wire import decode
from ..device import Device


class NoPromptEmbeds:
    """Every token of every prompt has an id."""

    def write(self, plan: StepPlan) -> None:
        """Takes the embeddings of a step; called in "writes"."""

    def given(self, num_tokens: int) -> tuple[Tensor, Tensor] | None:
        """`ModelInputs.embeds` and `.given` of a step of so many tokens, at addresses that never change."""
        del num_tokens
        return None

    def memory(self) -> dict[str, Tensor]:
        """The tensors that captured steps read, by name."""
        return {}


class PromptEmbeds(NoPromptEmbeds):
    """Embeddings of `size` numbers of `dtype`, for steps of at most `max_tokens`."""

    def __init__(self, device: Device, max_tokens: int, size: int, dtype: torch.dtype) -> None:
        self._device = device
        self._rows = device.zeros(max_tokens, size, dtype=dtype)
        self._given = device.zeros(max_tokens, dtype=torch.bool)
        self._used = False  # whether the step before had embeddings

    def write(self, plan: StepPlan) -> None:
        if self._used:
            self._given.zero_()
        self._used = EMBEDS in plan.extras
        if not self._used:
            return
        found = decode(plan.extras[EMBEDS], Rows)
        # what fills up is the last row again, at its own place
        places = self._device.stage_padded("rows", found.places).long()
        rows = self._device.stage_padded("rows", found.rows, axis=0)
        self._rows.index_copy_(0, places, rows.to(self._rows.dtype))
        self._given.index_fill_(0, places, True)

    def given(self, num_tokens: int) -> tuple[Tensor, Tensor] | None:
        return self._rows[:num_tokens], self._given[:num_tokens]

    def memory(self) -> dict[str, Tensor]:
        return {"embeddings of prompts": self._rows, "tokens that have one": self._given}
