"""Route policies that are wrong in one way each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from frame.interfaces import Route, RoutePolicy, RouteRequest, RouteServer


class Faithful(RoutePolicy):
    """Stays with the first server that it ever saw."""

    first: RouteServer | None = None

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        self.first = self.first or servers[0]
        return self.first


class Counting(RoutePolicy):
    """Counts in the server's own record what it sends there."""

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        chosen: Any = min(servers, key=lambda server: server.in_flight)
        chosen.in_flight += 1
        return chosen


class Picky(RoutePolicy):
    """Takes every body for JSON."""

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        found = json.loads(request.body or b"{}")
        if not isinstance(found, dict):
            raise ValueError("a body is an object")
        return servers[len(found) % len(servers)]


class Selfish(RoutePolicy):
    """Has a server that answers compute the prompts of the others."""

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        return servers[0]

    def route(self, request: RouteRequest, servers: Sequence[RouteServer], prefills: Sequence[RouteServer]) -> Route:
        return Route(servers[0], servers[-1])
