"""Logits processors by slot: who opted in, and the rows that each may touch. Knows no processor's meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...interfaces.logits import LogitsProcessor
from ...interfaces.setup import ProcessorSetup
from ...interfaces.step import NewRequest
from .request_processors import RequestProcessors
from .sampling_slots import Need


class ProcessorSlots:
    """The processors of one worker and the slots that opted in to each.

    Before those that were loaded come the callables that requests bring themselves.
    """

    def __init__(self, max_slots: int, processors: Sequence[LogitsProcessor], device: torch.device) -> None:
        brought = RequestProcessors(lambda params: params.logits_processors or (), ProcessorSetup(device, max_slots))
        self._loaded = bool(processors)
        self._processors: list[LogitsProcessor] = [brought, *processors]
        self._opted = np.zeros((len(self._processors), max_slots + 1), bool)  # the last, -1, is nobody's
        self._reads = np.zeros(max_slots, bool)
        self._outputs: dict[int, list[int]] = {}

    def add(self, request: NewRequest) -> Need:
        """Offers a request to every processor; says what its rows need."""
        slot, needs = request.slot, Need(0)
        self.remove(slot)
        if not (self._loaded or request.params.logits_processors):
            return needs
        prompt_ids: list[int] = request.token_ids[: request.prompt_len].tolist()
        output_ids: list[int] = request.token_ids[request.prompt_len :].tolist()
        self._outputs[slot] = output_ids
        for index, processor in enumerate(self._processors):
            opted = bool(processor.add(slot, request.params, prompt_ids, output_ids))
            self._opted[index, slot] = opted
            if opted:
                needs |= Need.INVARIANT_PROCESSORS if processor.argmax_invariant else Need.PROCESSORS
                self._reads[slot] |= processor.needs_output_ids
        return needs

    def remove(self, slot: int) -> None:
        """Tells every processor that a request left; an empty slot is fine."""
        if self._outputs.pop(slot, None) is None:
            return
        self._opted[:, slot] = False
        self._reads[slot] = False
        for processor in self._processors:
            processor.remove(slot)

    @property
    def active(self) -> bool:
        """Whether a request was offered to processors that is still there."""
        return bool(self._outputs)

    def needs_output_ids(self, slots: np.ndarray) -> bool:
        """Whether one of these slots is read by a processor that wants its output ids."""
        return bool(self._outputs) and bool(self._reads[slots].any())

    def deliver(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Appends tokens to the live lists that the processors were given."""
        if self._outputs:
            for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if self._reads[slot]:
                    self._outputs[slot].append(token)

    def apply(self, logits: Tensor, slots: np.ndarray, *, invariant: bool, rows: np.ndarray | None = None) -> Tensor:
        """Runs the processors that are (or are not) argmax-invariant, each on the rows that opted in to it.

        `rows` bool [N] limits that further. Raises `RuntimeError` when a processor returns another shape.
        """
        for index, processor in enumerate(self._processors):
            if processor.argmax_invariant != invariant:
                continue
            chosen = self._opted[index, slots]
            if rows is not None:
                chosen = chosen & rows
            if chosen.all():
                logits = _checked(processor, processor.apply(logits, slots.tolist()), logits)
            elif chosen.any():
                places = torch.from_numpy(np.flatnonzero(chosen)).to(logits.device)
                part = logits.index_select(0, places)
                logits[places] = _checked(processor, processor.apply(part, slots[chosen].tolist()), part)
        return logits


def _checked(processor: LogitsProcessor, result: Tensor, given: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != given.shape:
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise RuntimeError(
            f"logits processor {type(processor).__name__} returned {shape} for logits of {list(given.shape)}"
        )
    return result.float()
