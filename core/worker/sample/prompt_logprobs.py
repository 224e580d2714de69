"""Log-probabilities of prompt tokens, chunk by chunk as the prompt is computed. Knows no sampling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from ...interfaces.platform import HostCopy
from ...interfaces.step import LogprobRows, NewRequest, StepPlan
from ..device import Device

#: Most positions whose logits are computed at once.
MAX_ROWS = 128


class PromptChunks:
    """Log-probabilities of one step's prompt tokens, on their way to the host."""

    def __init__(self, copies: list[tuple[int, int, HostCopy]]) -> None:
        self._copies = copies  # (row of the plan, number of positions, those positions and padding)

    def rows(self) -> dict[int, LogprobRows]:
        """By row of the plan; waits for the copies."""
        parts: dict[int, list[dict[str, np.ndarray]]] = {}
        for row, count, copy in self._copies:
            arrays = {name: array[:count] for name, array in copy.wait().items()}
            parts.setdefault(row, []).append(arrays)
        return {
            row: LogprobRows(
                token_ids=np.concatenate([part["ids"] for part in found]),
                logprobs=np.concatenate([part["values"] for part in found]),
                ranks=np.concatenate([part["ranks"] for part in found]),
            )
            for row, found in parts.items()
        }


class PromptLogprobs:
    """Scores the prompts of the slots that asked: the hidden state at position i scores prompt token i + 1.

    A step scores the positions that it computes, from `num_computed` on. A prefill repeated after a preemption scores
    them again, and the engine drops the second scores; a request that has output already is not scored.
    """

    def __init__(self, device: Device, logprobs_mode: str) -> None:
        self._device = device
        self._normalize = logprobs_mode.endswith("logprobs")
        self._asked: dict[int, tuple[int, int]] = {}

    def add(self, request: NewRequest) -> None:
        """A request takes its slot."""
        self._asked.pop(request.slot, None)
        k = request.params.prompt_logprobs
        if k is not None and len(request.token_ids) <= request.prompt_len:
            self._asked[request.slot] = k, request.prompt_len

    def remove(self, slot: int) -> None:
        """The request left its slot; an empty slot is fine."""
        self._asked.pop(slot, None)

    def collect(
        self,
        plan: StepPlan,
        hidden: Tensor,
        token_table: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> PromptChunks | None:
        """Scores the prompt tokens that `hidden` [T, H] of this step covers; None when nobody asked.

        `token_table` int32 [R, max_len] holds the prompts. Logits are computed for a bounded number of rows at a time.
        """
        if not self._asked:
            return None
        copies: list[tuple[int, int, HostCopy]] = []
        columns = plan.slots, plan.num_computed, plan.num_scheduled, plan.num_scheduled.cumsum() - plan.num_scheduled
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for row, (slot, first, scheduled, offset) in enumerate(rows):
            if slot not in self._asked:
                continue
            k, prompt_len = self._asked[slot]
            total = min(scheduled, prompt_len - 1 - first)
            for start in range(0, total, MAX_ROWS):
                count = min(MAX_ROWS, total - start)
                logits = compute_logits(self._part(hidden, offset + start, count)).float()
                targets = self._part(token_table[slot], first + start + 1, count)
                copies.append((row, count, self._scored(logits, targets, k)))
        return PromptChunks(copies) if copies else None

    def _scored(self, logits: Tensor, targets: Tensor, k: int) -> HostCopy:
        """Starts the copy of each target's log-probability and of the k best (all of them where k is negative)."""
        vocab_size = logits.shape[-1]
        k = vocab_size if k < 0 else min(k, vocab_size)
        padded_k = self._device.pad("logprobs", k, vocab_size)
        ids, values, ranks = self._device.ops.top_logprobs(logits, targets, padded_k, self._normalize)
        return self._device.streams.copy_out({"ids": ids[:, : k + 1], "values": values[:, : k + 1], "ranks": ranks})

    def _part(self, values: Tensor, first: int, count: int) -> Tensor:
        """values[first : first + count], the last one repeated where the platform pads rows."""
        if self._device.shapes.pad("rows", count) == count:
            return values[first : first + count]
        return values.index_select(0, self._device.stage_padded("rows", np.arange(first, first + count)))
