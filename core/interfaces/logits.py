"""A logits processor: changes the logits of the requests that opted in, before sampling.

State follows slots. Knows no scheduler and no text.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .sampling import SamplingParams

if TYPE_CHECKING:
    from .setup import ProcessorSetup

#: What a request may bring: (output ids, its logits [vocab_size]) -> logits, or with the prompt's ids in front.
RequestLogitsProcessor = Callable[..., Tensor]


class LogitsProcessor(ABC):
    """Built once per worker as `Class(setup, options)`.

    `argmax_invariant`: it never changes which token is the most likely, so all-greedy batches skip it.
    `needs_output_ids`: `apply` reads the output ids handed to `add`, so a step waits until they reached the host.
    """

    argmax_invariant: bool = False
    needs_output_ids: bool = False

    def __init__(self, setup: ProcessorSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.device: torch.device = setup.device

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        """Raises `ValueError` when a request's `extra_args` for this processor are wrong; called at admission."""
        del params

    @abstractmethod
    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        """A request took `slot` (whatever was there is gone); returns whether it opted in.

        `output_ids` is live: it grows as tokens arrive (when `needs_output_ids`); after a preemption it is not empty.
        """

    @abstractmethod
    def remove(self, slot: int) -> None:
        """The request left `slot`; called for every request, also those that did not opt in."""

    @abstractmethod
    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """Logits float32 [N, vocab_size], row i of slot slots[i]; changes them in place or returns new ones."""


class ForeignLogitsProcessor(ABC):
    """A class written for another interface than frame's, which says how it is run."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises `ValueError` when a request's parameters are wrong; called at admission."""
        del sampling_params

    @classmethod
    @abstractmethod
    def adapted(cls, setup: ProcessorSetup) -> LogitsProcessor:
        """A processor of this class, built once per worker, behind frame's interface."""


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
