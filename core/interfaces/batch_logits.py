"""Logits processors written against a dense batch, as vLLM's are: the same methods, run through an adapter.

New processors should derive from `LogitsProcessor`, whose state follows slots and which costs nothing to requests that
did not opt in. Knows no slot.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .sampling import SamplingParams

if TYPE_CHECKING:
    from .setup import ProcessorSetup

#: What a request may bring: (output ids, its logits [vocab_size]) -> logits, or with the prompt's ids in front.
RequestLogitsProcessor = Callable[..., Tensor]


class MoveDirectionality(Enum):
    """Whether a move empties its source or exchanges two rows."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch's rows changed since the last step. To be consumed in this order: removed, added, moved.

    `batch_size` rows remain at the end. `removed` rows became empty. `added` are (row, params, prompt ids, output
    ids); the row may be an occupied one, whose request is gone; output ids grow in place as tokens arrive. `moved` are
    (source, target, direction), applied one after the other; what was at the target of a one-way move is gone. No row
    is both removed and added.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class BatchLogitsProcessor(ABC):
    """A processor of the whole batch. Built once per worker as `Class(setup, device, is_pin_memory)`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises `ValueError` when a request's parameters are wrong; called at admission."""
        del sampling_params

    @abstractmethod
    def __init__(self, setup: ProcessorSetup, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Logits float32 [batch_size, vocab_size]; changes them in place or returns new ones."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token is the most likely; asked once, after construction."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before every `apply`; None when no row came, went or moved."""


class AdapterLogitsProcessor(BatchLogitsProcessor):
    """Runs one callable a request: a subclass says which in `new_req_logits_processor`, and `is_argmax_invariant`."""

    def __init__(self, setup: ProcessorSetup, device: torch.device, is_pin_memory: bool) -> None:
        del setup, device, is_pin_memory
        self._calls: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable for a new request, or None when it does not take part."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._calls.pop(row, None)
        for row, params, prompt_ids, output_ids in batch_update.added:
            self._calls.pop(row, None)
            processor = self.new_req_logits_processor(params)
            if processor is not None:
                self._calls[row] = bind(processor, prompt_ids or [], output_ids)
        for source, target, direction in batch_update.moved:
            moving, there = self._calls.pop(source, None), self._calls.pop(target, None)
            if moving is not None:
                self._calls[target] = moving
            if there is not None and direction is MoveDirectionality.SWAP:
                self._calls[source] = there

    def apply(self, logits: Tensor) -> Tensor:
        for row, call in self._calls.items():
            logits[row] = call(logits[row])
        return logits


def bind(processor: RequestLogitsProcessor, prompt_ids: list[int], output_ids: list[int]) -> Callable[[Tensor], Tensor]:
    """The processor as a function of the logits alone; raises `ValueError` as `takes_prompt` does."""
    return partial(processor, *([prompt_ids, output_ids] if takes_prompt(processor) else [output_ids]))


def takes_prompt(processor: RequestLogitsProcessor) -> bool:
    """Whether a request's callable takes three arguments; raises `ValueError` when it takes neither two nor three."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        parameter
        for parameter in inspect.signature(processor).parameters.values()
        if parameter.kind in positional and parameter.default is inspect.Parameter.empty
    ]
    if len(required) not in (2, 3):
        raise ValueError(
            "a logits processor must take (output_ids, logits) or (prompt_ids, output_ids, logits), "
            f"got {processor!r} with {len(required)} arguments"
        )
    return len(required) == 3
