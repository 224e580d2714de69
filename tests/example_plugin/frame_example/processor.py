"""A logits processor: `SamplingParams(extra_args={"example_avoid": [3, 4]})` keeps tokens from being drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LogitsProcessor, ProcessorSetup, SamplingParams

ARGUMENT = "example_avoid"


class AvoidTokens(LogitsProcessor):
    """State follows slots: `add` when a request takes one, `remove` when it leaves."""

    def __init__(self, setup: ProcessorSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._avoided: dict[int, Tensor] = {}

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        given = (params.extra_args or {}).get(ARGUMENT, [])
        if not isinstance(given, list) or any(type(token) is not int or token < 0 for token in given):
            raise ValueError(f"{ARGUMENT} must be a list of token ids, got {given!r}")

    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        self.remove(slot)
        given = (params.extra_args or {}).get(ARGUMENT)
        if given:
            self._avoided[slot] = torch.tensor(given, device=self.device)
        return bool(given)

    def remove(self, slot: int) -> None:
        self._avoided.pop(slot, None)

    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        for row, slot in enumerate(slots):
            if slot in self._avoided:
                logits[row, self._avoided[slot]] = float("-inf")
        return logits
