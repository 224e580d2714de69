"""What a worker asks of expert balance, and the null object, with which experts stay where they are."""

from __future__ import annotations

from frame.core.interfaces.step import ExpertReport


class NoBalance:
    """Experts stay where they are. The null object."""

    def advance(self, dummy: bool) -> ExpertReport | None:
        """Ends a step; `dummy` steps, which compute for no request, advance the count but not the loads.

        Returns what has been done since the start, where that has changed.
        """
        del dummy
        return None

    def settle(self) -> None:
        """Ends a decision and moves that are under way; every rank must call it after the same step."""

    def close(self) -> None:
        """Ends the trace; the balance is used no more."""
