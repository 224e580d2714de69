"""A speculator: guesses the next tokens of requests, which the model then checks all at once.

Wrong guesses cost time, and never change what is generated. What `propose` reads and returns is on the device, so that
a step need not wait for the tokens of the one before. Knows no scheduler and no text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .step import NewRequest

if TYPE_CHECKING:
    from ..ops import Ops
    from .setup import SpeculatorSetup


@dataclass(frozen=True)
class DraftContext:
    """The S rows of a step that just got tokens.

    `token_ids` int32 [number of slots, width] holds the tokens of every slot. `slots` int32 [S] are the slots of the
    rows, each once, and `lengths` int32 [S] how many of their tokens are known; those behind must not be read. No
    length is above `longest`. A platform may pad with rows of slot -1, whose guesses are dropped.
    """

    token_ids: Tensor
    slots: Tensor
    lengths: Tensor
    longest: int


@dataclass(frozen=True)
class Drafts:
    """Guesses, int32 [S, k] and [S]: the next tokens of row i may be the first `counts[i]` of `token_ids[i]`."""

    token_ids: Tensor
    counts: Tensor


class Speculator(ABC):
    """Built once per worker as `Class(setup, options)`; the worker's thread makes all calls.

    `num_drafts` is k, the most tokens that it may guess for a row. What it keeps of a request it keeps by slot.
    """

    def __init__(self, setup: SpeculatorSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.num_drafts: int = setup.num_drafts
        self.ops: Ops = setup.ops
        self.device: torch.device = setup.device

    def add(self, request: NewRequest) -> None:
        """Called when a request enters its slot, in place of any earlier one."""

    def remove(self, slot: int) -> None:
        """Called when the request has left `slot`, or when the slot was empty."""

    @abstractmethod
    def propose(self, context: DraftContext) -> Drafts:
        """Returns guesses for the rows of `context`, which it must not change.

        Every returned id must lie in the vocabulary. Equal contexts must give equal guesses on every rank.
        """
