"""Logits processors written against a dense batch, as vLLM's are: the same methods, run through an adapter.

New processors should derive from `LogitsProcessor`, whose state follows slots and which costs nothing to requests that
did not opt in. Knows no slot.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from frame.core.interfaces.logits import ForeignLogitsProcessor, LogitsProcessor, RequestLogitsProcessor, bind
from frame.core.interfaces.sampling import SamplingParams

if TYPE_CHECKING:
    from frame.core.interfaces.setup import ProcessorSetup


class MoveDirectionality(Enum):
    """Whether a move empties its source or exchanges two rows."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch's rows changed since the last step. Apply it in this order: removed, added, moved.

    `batch_size` rows remain at the end. `removed` rows became empty. `added` are (row, params, prompt ids, output
    ids); where the row was occupied, its earlier request has left; output ids grow in place as tokens arrive. `moved`
    are (source, target, direction), applied one after the other; a one-way move overwrites its target. No row is both
    removed and added.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class BatchLogitsProcessor(ForeignLogitsProcessor):
    """A processor of the whole batch. Built once per worker as `Class(setup, device, is_pin_memory)`."""

    @classmethod
    def adapted(cls, setup: ProcessorSetup) -> LogitsProcessor:
        """A `LogitsProcessor` that runs it on dense rows."""
        from .dense_rows import BatchProcessorAdapter

        return BatchProcessorAdapter(cls(setup, setup.device, setup.device.type == "cuda"), setup)

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
        """Called before every `apply`; None when no row was added, removed or moved."""


class AdapterLogitsProcessor(BatchLogitsProcessor):
    """Runs a callable for each request that has one; a subclass defines which, and `is_argmax_invariant`."""

    def __init__(self, setup: ProcessorSetup, device: torch.device, is_pin_memory: bool) -> None:
        del setup, device, is_pin_memory
        self._calls: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable for a new request, or None when it needs none."""

    @classmethod
    def adapted(cls, setup: ProcessorSetup) -> LogitsProcessor:
        """Runs its callables on single rows, at no cost to other requests, unless it changes how they are run."""
        if cls.apply is not AdapterLogitsProcessor.apply or cls.update_state is not AdapterLogitsProcessor.update_state:
            return super().adapted(setup)
        from frame.core.worker.sample.processors import RequestProcessors

        adapter = cls(setup, setup.device, setup.device.type == "cuda")

        def choose(params: SamplingParams) -> list[RequestLogitsProcessor]:
            processor = adapter.new_req_logits_processor(params)
            return [] if processor is None else [processor]

        return RequestProcessors(choose, setup, argmax_invariant=bool(adapter.is_argmax_invariant()))

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
