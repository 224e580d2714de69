"""Poolers: how the hidden states of a prompt become rows. They know neither requests nor text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..ops import Ops
    from .setup import PoolerSetup


@dataclass(frozen=True)
class PoolerRows:
    """The rows of one step that one pooler serves, on the host; B of them.

    Row i owns the hidden states starts[i] .. starts[i] + counts[i], which are those of positions[i] and after; its
    request has slot slots[i], and last[i] says that its prompt ends with this step.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    positions: np.ndarray
    last: np.ndarray

    @property
    def whole(self) -> bool:
        """Whether every row is a whole prompt."""
        return bool(self.last.all()) and not self.positions.any()


@dataclass(frozen=True)
class PoolerSizes:
    """What a pooler may allocate: slots of requests, the width of a hidden state, the device."""

    num_slots: int
    hidden_size: int
    device: torch.device


class Pooler(ABC):
    """Makes rows of hidden states. Built as `Class(setup, options)`.

    A prompt may arrive in several steps, so what is not finished is kept by slot.
    """

    #: whether every token of the prompt must be computed, so that cached prefixes are of no use
    needs_every_token: ClassVar[bool] = True
    #: whether a request gets a row for each (chosen) token instead of one
    per_token: ClassVar[bool] = False

    def __init__(self, setup: PoolerSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.sizes: PoolerSizes = setup.sizes
        self.ops: Ops = setup.ops
        self.stage: Callable[[np.ndarray], Tensor] = setup.stage

    def add(self, slot: int, token_ids: np.ndarray) -> None:
        """A request with this prompt takes a slot, which may hold what an older one left."""

    def remove(self, slot: int) -> None:
        """The request left its slot, maybe before its prompt was complete; an empty slot is fine."""

    @abstractmethod
    def pool(self, hidden: Tensor, rows: PoolerRows) -> tuple[Tensor, list[int]]:
        """Rows [N, hidden_size] of the requests whose prompt ends now, in their order, and how many each has.

        `hidden` [T, hidden_size] is valid during this call only.
        """
