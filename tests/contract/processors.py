"""Logits processors to try the suite on: one of each style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from frame.interfaces import AdapterLogitsProcessor, LogitsProcessor, ProcessorSetup, SamplingParams


class Boost(LogitsProcessor):
    """Adds extra_args["boost"] = [token, amount]."""

    def __init__(self, setup: ProcessorSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self.boosts: dict[int, tuple[int, float]] = {}

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        boost = (params.extra_args or {}).get("boost")
        if boost is not None and not (isinstance(boost, list) and len(boost) == 2 and isinstance(boost[0], int)):
            raise ValueError(f"boost must be [token, amount], got {boost!r}")

    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        self.boosts.pop(slot, None)
        boost = (params.extra_args or {}).get("boost")
        if boost:
            self.boosts[slot] = boost
        return bool(boost)

    def remove(self, slot: int) -> None:
        self.boosts.pop(slot, None)

    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        for row, slot in enumerate(slots):
            token, amount = self.boosts[slot]
            logits[row, token] += amount
        return logits


class NoRepeat(Boost):
    """Forbids the token that came last."""

    needs_output_ids = True

    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        self.outputs = getattr(self, "outputs", {})
        self.outputs[slot] = output_ids
        return bool((params.extra_args or {}).get("boost"))

    def remove(self, slot: int) -> None:
        getattr(self, "outputs", {}).pop(slot, None)

    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        for row, slot in enumerate(slots):
            if self.outputs[slot]:
                logits[row, self.outputs[slot][-1]] = float("-inf")
        return logits


class DenseBoost(AdapterLogitsProcessor):
    """The same as `Boost`, for a dense batch."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        Boost.validate(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        boost = (params.extra_args or {}).get("boost")
        if not boost:
            return None

        def call(output_ids: list[int], logits: Tensor) -> Tensor:
            logits[boost[0]] += boost[1]
            return logits

        return call


class Leaky(Boost):
    """Wrong on purpose: keeps what a slot was told before."""

    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        boost = (params.extra_args or {}).get("boost")
        if boost:
            amount = self.boosts.get(slot, (0, 0.0))[1]
            self.boosts[slot] = (boost[0], amount + boost[1])
        return bool(boost)

    def remove(self, slot: int) -> None:
        pass
