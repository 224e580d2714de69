"""A speculator: guesses the next tokens of requests, which the model then checks all at once.

Guesses cost time when they are wrong and never change what is generated. State follows slots; everything that `propose`
reads and returns is on the device, so that a step needs no answer of the one before. Knows no scheduler and no text.
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
    """The S rows that just got tokens. R slots.

    `token_ids` int32 [R, width] holds the tokens of every slot, `slots` int32 [S] are the rows' slots (distinct) and
    `lengths` int32 [S] their known tokens; what lies behind is not to be read. No length is above `longest`. Where the
    platform pads rows, those of slot -1 fill up: what is guessed for them is dropped.
    """

    token_ids: Tensor
    slots: Tensor
    lengths: Tensor
    longest: int


@dataclass(frozen=True)
class Drafts:
    """Guesses: row i's next tokens are thought to be the first `counts[i]` of `token_ids[i]`; int32 [S, k] and [S]."""

    token_ids: Tensor
    counts: Tensor


class Speculator(ABC):
    """Built once per worker as `Class(setup, options)`.

    `num_drafts` is k, the most tokens that it may guess for a row.
    """

    def __init__(self, setup: SpeculatorSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.num_drafts: int = setup.num_drafts
        self.ops: Ops = setup.ops
        self.device: torch.device = setup.device

    def add(self, request: NewRequest) -> None:
        """A request took its slot; whatever was there is gone."""

    def remove(self, slot: int) -> None:
        """The request left `slot`; an empty slot is fine."""

    @abstractmethod
    def propose(self, context: DraftContext) -> Drafts:
        """Guesses for the rows of a step that just got tokens; changes nothing it is given.

        Every returned id must lie in the vocabulary. The same context gives the same guesses on every rank.
        """
