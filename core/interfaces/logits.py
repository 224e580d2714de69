"""A logits processor: changes the logits of the requests that opted in, before tokens are drawn.

What it keeps of a request it keeps by the request's slot. Knows no scheduler and no text.
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

#: A callable of a request: (output ids, logits [vocab_size]) → logits, or with the prompt's ids as first argument.
RequestLogitsProcessor = Callable[..., Tensor]


class LogitsProcessor(ABC):
    """Built once per worker as `Class(setup, options)`.

    The worker's thread makes all calls but `validate`.
    """

    #: whether it never changes which token is the most likely, so that batches of greedy requests skip it
    argmax_invariant: bool = False
    #: whether `apply` reads the output ids that `add` was given, so that a step waits until these reached the host
    needs_output_ids: bool = False

    def __init__(self, setup: ProcessorSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.device: torch.device = setup.device

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        """Raises `ValueError` when a request's `extra_args` are wrong for this processor; called at admission."""
        del params

    @abstractmethod
    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        """Called when a request enters `slot`, in place of any earlier one; returns whether it opts in.

        With `needs_output_ids` the list `output_ids` grows as tokens arrive. After a preemption it begins non-empty.
        """

    @abstractmethod
    def remove(self, slot: int) -> None:
        """Called when the request in `slot` has left it, also for requests that did not opt in."""

    @abstractmethod
    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """Returns the changed `logits` float32 [N, vocab_size], in place or new ones; row i is of slots[i]."""


class ForeignLogitsProcessor(ABC):
    """A class of logits processors that was written for another interface, and wraps itself in frame's."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises `ValueError` when a request's parameters are wrong; called at admission."""
        del sampling_params

    @classmethod
    @abstractmethod
    def adapted(cls, setup: ProcessorSetup) -> LogitsProcessor:
        """Returns a processor of this class behind frame's interface; called once per worker."""


def bind(processor: RequestLogitsProcessor, prompt_ids: list[int], output_ids: list[int]) -> Callable[[Tensor], Tensor]:
    """Returns a request's callable as a function of its logits alone; raises `ValueError` as `takes_prompt` does."""
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
