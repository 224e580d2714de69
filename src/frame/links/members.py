"""The null object of a server's dealings with engines of other machines that end and begin with its own."""

from __future__ import annotations

from collections.abc import Sequence

from .fate_messages import FateNews


class NoMembers:
    """Engines of other machines that share no experts: none ends with another."""

    #: whether they end and start together with those of the server
    joined = False

    async def news(self, message: FateNews) -> None:
        """What a machine says of the end of an engine, or of a wave."""

    def lost(self, ranks: Sequence[int], cause: str) -> None:
        """The machine of these engines is gone."""
