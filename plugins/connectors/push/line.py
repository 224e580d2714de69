"""What is to be done for parcels, in order: each piece once its mark is passed. Knows no connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from frame.interfaces import Mark

from .parcels import Parcel


@dataclass
class _Piece:
    """Work for parcels, done after what was given before for one of them and once `mark` is passed, if there is one."""

    parcels: frozenset[Parcel]
    mark: Mark | None
    work: Callable[[], None]


class Line:
    """Of one lane, whose thread alone calls it; any thread may ask whether something is left in it."""

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, parcels: Iterable[Parcel], mark: Mark | None, work: Callable[[], None]) -> None:
        """Has work be done for parcels, after what was added before for one of them; with a mark once it is passed."""
        self._pieces.append(_Piece(frozenset(parcels), mark, work))

    def work_off(self) -> None:
        """Does what can be done: marks behind one that is not passed are not looked at."""
        given = list(self._pieces)  # which stays as it is meanwhile, but for what the work adds: the lane is not idle
        left, held, passed = list[_Piece](), set[Parcel](), True
        for piece in given:
            passed = passed and (piece.mark is None or _is_passed(piece.mark))
            if (passed or piece.mark is None) and held.isdisjoint(piece.parcels):
                piece.work()
            else:
                held |= piece.parcels
                left.append(piece)
        if len(left) < len(given):
            self._pieces = deque([*left, *list(self._pieces)[len(given) :]])

    def finish(self) -> None:
        """Does all that is left, whatever its marks say."""
        while self._pieces:
            self._pieces.popleft().work()


def _is_passed(mark: Mark) -> bool:
    """Whether `wait` of a mark would return, or raise, at once."""
    try:
        return mark.done()
    except Exception:  # of the device: `wait` says it
        return True
