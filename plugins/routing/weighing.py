"""Weighs what a server has of a prompt against what it has to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from frame.interfaces import RouteServer


class Weighing:
    """Chooses the server with the least to do: tokens of the prompt that it lacks, and `load_tokens` for each request.

    Equal ones take turns.
    """

    def __init__(self, load_tokens: float) -> None:
        self._load_tokens = load_tokens
        self._turn = 0

    def choose(self, servers: Sequence[RouteServer], cached: Callable[[RouteServer], float]) -> RouteServer:
        """One of `servers`, of which each has `cached` tokens of the prompt."""

        def cost(place: int) -> float:
            server = servers[place]
            return self._load_tokens * (server.in_flight + server.num_other) - cached(server)

        first, count = self._turn, len(servers)
        best = min((place % count for place in range(first, first + count)), key=cost)
        self._turn = best + 1
        return servers[best]
