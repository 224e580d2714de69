"""Log-probabilities of prompt tokens, chunk by chunk as the prompt is computed. Knows no sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...interfaces.platform import HostCopy
from ...interfaces.step import LogprobRows, NewRequest, StepPlan
from ..device import Device

#: Most positions whose logits are computed at once, whatever the length of a chunk.
MAX_ROWS = 128


@dataclass(frozen=True)
class _Span:
    """Positions first .. first + count - 1 of one row of the plan; their hidden states start at `offset`."""

    row: int
    slot: int
    k: int
    first: int
    count: int
    offset: int


class PromptChunks:
    """Log-probabilities of one step's prompt tokens, on their way to the host."""

    def __init__(self, copies: list[tuple[int, int, HostCopy]]) -> None:
        self._copies = copies  # row of the plan, number of positions, the positions and what fills up

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

    The rows of a step are those of the positions it computes, from `num_computed` on. A prefill that is repeated after
    a preemption brings them again, and whoever reads them drops those; one that already has output brings none.
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
        for span in self._spans(plan):
            for start in range(0, span.count, MAX_ROWS):
                count = min(MAX_ROWS, span.count - start)
                logits = compute_logits(self._part(hidden, span.offset + start, count)).float()
                targets = self._part(token_table[span.slot], span.first + start + 1, count)
                vocab_size = logits.shape[-1]
                k = vocab_size if span.k < 0 else min(span.k, vocab_size)
                padded_k = self._device.pad("logprobs", k, vocab_size)
                ids, values, ranks = self._device.ops.top_logprobs(logits, targets, padded_k, self._normalize)
                named = {"ids": ids[:, : k + 1], "values": values[:, : k + 1], "ranks": ranks}
                copies.append((span.row, count, self._device.streams.copy_out(named)))
        return PromptChunks(copies) if copies else None

    def _part(self, values: Tensor, first: int, count: int) -> Tensor:
        """values[first : first + count], the last one repeated where the platform pads rows."""
        if self._device.shapes.pad("rows", count) == count:
            return values[first : first + count]
        return values.index_select(0, self._device.stage_padded("rows", np.arange(first, first + count)))

    def _spans(self, plan: StepPlan) -> list[_Span]:
        spans = []
        offset = 0
        scheduled, computed = plan.num_scheduled.tolist(), plan.num_computed.tolist()
        for row, slot in enumerate(plan.slots.tolist()):
            if slot in self._asked:
                k, prompt_len = self._asked[slot]
                count = min(scheduled[row], prompt_len - 1 - computed[row])
                if count > 0:
                    spans.append(_Span(row, slot, k, computed[row], count, offset))
            offset += scheduled[row]
        return spans
