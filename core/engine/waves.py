"""When an engine whose data ranks share experts steps: in waves, which all of them begin and end with the same step.

A wave begins with as many steps as may be in flight, and each step in which any engine had requests is followed by
another one. So all engines launch equally many, without rows where they have no requests. Whoever gets a request when
no wave runs asks for the next one. `NoWaves` is the null object, for engines that nobody waits for. Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable

from ..interfaces.step import StepResult


class NoWaves:
    """The engine steps when it likes."""

    #: whether other engines step at the same time
    together = False
    #: whether steps were begun together that have not ended, or are to begin
    running = False
    #: whether a step may be launched, and whether it must be, if without rows
    allows, demands = True, False

    def begin(self, number: int) -> None:
        """Wave `number` begins, now or when the one before has ended."""
        raise ValueError(f"wave {number} cannot begin: this engine steps alone")

    def look(self, has_work: bool) -> None:
        """Called before launches; an engine that `has_work` asks for a wave when none runs."""

    def launched(self) -> None:
        """A step was launched."""

    def answered(self, result: StepResult) -> None:
        """The oldest launched step was answered."""


class Waves(NoWaves):
    """`ask(number)` has all engines begin that wave, this one too; several may ask for the same one."""

    together = True

    def __init__(self, max_in_flight: int, ask: Callable[[int], None]) -> None:
        self._max_in_flight, self._ask = max_in_flight, ask
        self._number = self._wanted = self._asked = 0
        self._in_flight = self._credit = 0

    @property
    def running(self) -> bool:  # type: ignore[override]
        return self._in_flight + self._credit > 0 or self._wanted > self._number

    @property
    def allows(self) -> bool:  # type: ignore[override]
        return self._credit > 0

    @property
    def demands(self) -> bool:  # type: ignore[override]
        return self._credit > 0

    def begin(self, number: int) -> None:
        self._wanted = max(self._wanted, number)

    def look(self, has_work: bool) -> None:
        if self._in_flight + self._credit > 0:
            return
        if self._wanted > self._number:
            self._number += 1  # one after the other, since the others do so
            self._credit = self._max_in_flight
        elif has_work and self._asked <= self._number:
            self._asked = self._number + 1
            self._ask(self._asked)

    def launched(self) -> None:
        self._credit -= 1
        self._in_flight += 1

    def answered(self, result: StepResult) -> None:
        self._in_flight -= 1
        self._credit += result.peers_busy
