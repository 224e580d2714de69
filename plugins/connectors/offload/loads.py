"""Loads of the offload connector's worker side that wait for rows of host memory to come from elsewhere.

Knows no device, and of a request only its id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ..blocks.messages import Move
from .messages import OffloadStep
from .mover import Moved, TierMover
from .row_copies import Copy


@dataclass(eq=False)
class ComingLoad:
    """What brings the rows of `copy` and those of its states: None where nothing does.

    They are kept here because the mover forgets what has ended, which may be before the next look.
    """

    copy: Copy
    rows: list[Future[Moved] | None]
    states: list[Future[Moved] | None]

    @property
    def ready(self) -> bool:
        """Whether nothing is on its way any more."""
        return all(move is None or move.done() for move in (*self.rows, *self.states))


class ComingLoads:
    """Rows come by `mover`; `fail` is told the moves whose rows did not."""

    def __init__(self, mover: TierMover, fail: Callable[[Sequence[Move]], None]) -> None:
        self._mover = mover
        self._fail = fail
        self._loads: list[ComingLoad] = []

    @property
    def numbers(self) -> set[int]:
        """The messages that asked for them."""
        return {one.copy.number for one in self._loads}

    @property
    def owners(self) -> list[str]:
        """The requests that wait for them."""
        return [one.copy.owner for one in self._loads]

    def add(self, step: OffloadStep) -> None:
        """What a message has loaded, for each request; the mover has begun with it."""
        copies: dict[str, Copy] = {}
        tokens = [(move, row) for move, row in zip(step.loads, step.load_rows, strict=True)]
        states = [(move, row) for move, row in zip(step.state_loads, step.state_load_rows, strict=True)]
        for move, _ in (*tokens, *states):
            copies.setdefault(move.owner, Copy(step.number, move.owner, [], []))
        for owner, copy in copies.items():
            own = [(move, row) for move, row in tokens if move.owner == owner]
            copy.moves, copy.rows = [move for move, _ in own], [row for _, row in own]
            copy.states = [(move, row) for move, row in states if move.owner == owner]
            self._loads.append(
                ComingLoad(
                    copy,
                    [self._mover.coming(row) for row in copy.rows],
                    [self._mover.coming_state(row) for _, row in copy.states],
                )
            )

    def ready(self) -> Iterator[Copy]:
        """Those whose rows are there, without what did not come; a request whose state did not come loads nothing."""
        for one in [one for one in self._loads if one.ready]:
            self._loads.remove(one)  # and not all at once: where one cannot be begun, those behind it are still to be
            copy = one.copy
            if not all(_there(row, move) for (_, row), move in zip(copy.states, one.states, strict=True)):
                self._fail([*copy.moves, *(move for move, _ in copy.states)])
                copy.moves, copy.rows, copy.states = [], [], []
            else:
                there = [_there(row, move) for row, move in zip(copy.rows, one.rows, strict=True)]
                self._fail([move for move, here in zip(copy.moves, there, strict=True) if not here])
                copy.moves, copy.rows = (
                    [move for move, here in zip(copy.moves, there, strict=True) if here],
                    [row for row, here in zip(copy.rows, there, strict=True) if here],
                )
            yield copy


def _there(row: int, move: Future[Moved] | None) -> bool:
    """Whether the row, which that was to bring, may be loaded."""
    return row >= 0 and (move is None or move.result().good)
