"""Where one output stands in its grammar, when the grammar begins, and how long its masks take. Knows ids only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from ...interfaces.grammar import Grammar

#: A mask that takes longer makes its grammar a slow one.
QUICK_SECONDS = 0.005
#: Quick fills in a row after which a new grammar, and one that was slow, counts as quick.
_NEW_PROOF, _SLOW_PROOF = 2, 8


class Pace:
    """How long the masks of one grammar take; `slow` until it has proved otherwise."""

    def __init__(self) -> None:
        self.slow = True
        self.was_slow = False
        self._missing = _NEW_PROOF  # quick masks that it must still show

    def note(self, seconds: float) -> None:
        """Counts a mask that took so many seconds; after a slow one the grammar must show several quick ones."""
        if seconds > QUICK_SECONDS:
            self.was_slow, self._missing = True, _SLOW_PROOF
        else:
            self._missing -= 1
        self.slow = self._missing > 0


class Ahead(NamedTuple):
    """A mask int32 [ceil(vocab_size / 32)] that is filled before its step is planned, and valid when `filled` is."""

    words: np.ndarray
    filled: Future[None]


class GrammarProgress:
    """Follows an output: free until `start_after` has appeared in it, then by the grammar.

    `pace` is that of all outputs of the grammar. `given` are ids that a replayed request had emitted before.
    """

    def __init__(self, grammar: Grammar, pace: Pace, start_after: Sequence[int], given: Iterable[int]) -> None:
        self.grammar = grammar
        self.pace = pace
        self.matcher = grammar.matcher()
        self.ahead: Ahead | None = None  # the mask of the next token, where it is filled before its step is planned
        self.begun = not start_after
        self._start_after = list(start_after)
        self._tail: deque[int] = deque(maxlen=len(start_after))
        for token in given:
            self.advance(token)

    @property
    def slow(self) -> bool:
        """Whether the next mask is, or must be, filled before its step is planned."""
        return self.begun and (self.pace.slow or self.ahead is not None)

    @property
    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.begun and self.matcher.finished

    def advance(self, token: int) -> bool:
        """Takes a token of the output; False when the grammar does not allow it."""
        self.ahead = None
        if self.begun:
            return self.matcher.advance(token)
        self._tail.append(token)
        self.begun = list(self._tail) == self._start_after
        return True
