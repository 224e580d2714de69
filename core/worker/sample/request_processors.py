"""Callables that single requests bring as logits processors. Knows no batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...interfaces.logits import LogitsProcessor, RequestLogitsProcessor, bind
from ...interfaces.sampling import SamplingParams
from ...interfaces.setup import ProcessorSetup


class RequestProcessors(LogitsProcessor):
    """Runs the callables that `choose` returns for a request, in order, on the request's row alone."""

    needs_output_ids = True

    def __init__(
        self,
        choose: Callable[[SamplingParams], Sequence[RequestLogitsProcessor]],
        setup: ProcessorSetup,
        *,
        argmax_invariant: bool = False,
    ) -> None:
        super().__init__(setup)
        self.argmax_invariant = argmax_invariant
        self._choose = choose
        self._calls: dict[int, list[Callable[[Tensor], Tensor]]] = {}

    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        self.remove(slot)
        chosen = self._choose(params)
        if chosen:
            self._calls[slot] = [bind(processor, list(prompt_ids), output_ids) for processor in chosen]
        return bool(chosen)

    def remove(self, slot: int) -> None:
        self._calls.pop(slot, None)

    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        for row, slot in enumerate(slots):
            changed = logits[row]
            for call in self._calls[slot]:
                changed = call(changed)
            logits[row] = changed
        return logits
