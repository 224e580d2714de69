"""Servers take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frame.interfaces import RoutePolicy, RouteRequest, RouteServer, Setup


class RoundRobinPolicy(RoutePolicy):
    """Each request goes to the server after the last one, whatever it has to do. Each role has turns of its own."""

    def __init__(self, setup: Setup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._turns: dict[str, int] = {}

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        role = servers[0].role
        turn = self._turns.get(role, 0)
        self._turns[role] = turn + 1
        return servers[turn % len(servers)]
