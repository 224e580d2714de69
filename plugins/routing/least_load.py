"""The server with the fewest requests under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frame.interfaces import RoutePolicy, RouteRequest, RouteServer, Setup


class LeastLoadPolicy(RoutePolicy):
    """Counts what this front has under way and what servers report of others; equal ones take turns.

    What a server reports is up to a second old, and is therefore used only for requests that came by other ways.
    """

    def __init__(self, setup: Setup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._turn = 0

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        first, count = self._turn, len(servers)
        places = (place % count for place in range(first, first + count))
        best = min(places, key=lambda place: servers[place].in_flight + servers[place].num_other)
        self._turn = best + 1
        return servers[best]
