"""A logits processor: changes the logits of the requests that opted in, before sampling.

State follows slots. Knows no scheduler and no text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .sampling import SamplingParams

if TYPE_CHECKING:
    from .setup import ProcessorSetup


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
