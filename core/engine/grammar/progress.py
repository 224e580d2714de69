"""Where one output stands in its grammar, and when the grammar begins. Knows ids only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ...interfaces.grammar import GrammarMatcher


class GrammarProgress:
    """Follows an output: free until `start_after` has appeared in it, then by the grammar.

    `given` are ids that a replayed request had emitted before.
    """

    def __init__(self, matcher: GrammarMatcher, start_after: Sequence[int], given: Iterable[int]) -> None:
        self.matcher = matcher
        self.begun = not start_after
        self._start_after = list(start_after)
        self._tail: deque[int] = deque(maxlen=len(start_after))
        for token in given:
            self.advance(token)

    @property
    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.begun and self.matcher.finished

    def advance(self, token: int) -> bool:
        """Takes a token of the output; False when the grammar does not allow it."""
        if self.begun:
            return self.matcher.advance(token)
        self._tail.append(token)
        self.begun = list(self._tail) == self._start_after
        return True
