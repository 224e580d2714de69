"""A logits processor that does harm on demand: `extra_args={"fault": "raise" | "exit" | "hang", "at": token}`.

With the fault "slow" each step of the request takes 0.02 seconds, on a quick machine as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from torch import Tensor

from frame.interfaces import LogitsProcessor, ProcessorSetup, SamplingParams

_SLOW_SECONDS = 0.02


class FaultyProcessor(LogitsProcessor):
    """Strikes when the request's token number `at` is drawn, however often it is computed again; hangs once only."""

    def __init__(self, setup: ProcessorSetup, options: object = None) -> None:
        super().__init__(setup, options)
        self._faults: dict[int, tuple[str, int]] = {}  # slot -> fault, tokens until it strikes

    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        arguments = params.extra_args or {}
        if "fault" not in arguments or (arguments["fault"] == "hang" and output_ids):
            return False
        self._faults[slot] = arguments["fault"], arguments.get("at", 3) - len(output_ids)
        return True

    def remove(self, slot: int) -> None:
        self._faults.pop(slot, None)

    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        for slot in slots:
            if slot not in self._faults:
                continue
            fault, left = self._faults[slot]
            if fault == "slow":
                time.sleep(_SLOW_SECONDS)
                continue
            self._faults[slot] = fault, left - 1
            if left <= 0 and fault == "raise":
                raise RuntimeError("this request breaks its step")
            if left <= 0 and fault == "exit":
                os._exit(7)
            if left <= 0:
                time.sleep(3600)
        return logits
