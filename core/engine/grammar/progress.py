"""Where one output stands in its grammar, and when the grammar begins. Knows ids only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ...interfaces.grammar import Grammar
from .masks import Ahead, Pace


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
