"""Route policies that are wrong in one way each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from frame.interfaces import Ask, KVChange, KVRemoved, Route, RoutePolicy, RouteRequest, RouteServer, Setup


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


class First(RoutePolicy):
    """Right in what it chooses."""

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        return servers[0]


class Trusting(First):
    """Takes what a server answers for tokens."""

    prepares = True

    async def prepare(self, request: RouteRequest, servers: Sequence[RouteServer], ask: Ask) -> None:
        answer = await ask(servers[0], "/tokenize", request.body)
        if answer is not None:
            request.tokens = json.loads(answer)["tokens"]


class Strict(First):
    """Takes every removed block for one that was stored."""

    def __init__(self, setup: Setup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._names = set[int | bytes]()

    def kv_changed(self, server: str, rank: int, change: KVChange) -> None:
        if isinstance(change, KVRemoved):
            for name in change.names:
                self._names.remove(name)


class Talkative(First):
    """Counts in words."""

    def figures(self) -> dict[str, Any]:
        return {"requests": "many"}


class Silent(RoutePolicy):
    """Gives nothing where a route and figures are due."""

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        return servers[0]

    def route(self, request: RouteRequest, servers: Sequence[RouteServer], prefills: Sequence[RouteServer]) -> Any:
        return None

    def figures(self) -> Any:
        return None
