"""A pooler: makes rows of the hidden states of a prompt. Knows neither requests nor text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from ..ops import Ops
    from .setup import PoolerSetup


@dataclass(frozen=True)
class PoolerRows:
    """The B rows of one step that one pooler serves, as arrays [B] on the host.

    Row i, of the request in slot slots[i], has the hidden states starts[i] .. starts[i] + counts[i] of the step, whose
    positions in the prompt begin at positions[i]. last[i]: the prompt ends with this step.
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


class Pooler(ABC):
    """Makes rows of hidden states. Built as `Class(setup, options)`; the worker's thread makes all calls.

    A prompt may be computed in several steps, so a pooler keeps what is unfinished by slot.
    """

    #: whether it needs the hidden states of all tokens of the prompt, so that cached prefixes cannot be skipped
    needs_every_token: ClassVar[bool] = True
    #: whether a request gets a row for each of its tokens, or of some of them, instead of one row
    per_token: ClassVar[bool] = False

    def __init__(self, setup: PoolerSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.ops: Ops = setup.ops
        self.stage: Callable[[np.ndarray], Tensor] = setup.stage

    def add(self, slot: int, token_ids: np.ndarray) -> None:
        """Called when a request with this prompt enters `slot`, which may hold what an earlier one left."""

    def remove(self, slot: int) -> None:
        """Called when the request has left `slot`, maybe before its prompt was complete, or when the slot was empty."""

    @abstractmethod
    def pool(self, hidden: Tensor, rows: PoolerRows) -> tuple[Tensor, list[int]]:
        """Returns rows [N, hidden_size] of the requests whose prompt ends now, in order, and how many each request has.

        `hidden` [T, hidden_size] is valid during this call only.
        """
