"""A route policy: requests with the same beginning go to the server that has its KV in its prefix cache."""

import hashlib
from collections.abc import Sequence

from frame.interfaces import RoutePolicy, RouteRequest, RouteServer


class SessionPolicy(RoutePolicy):
    """The same `prompt_cache_key` means the same server while that is ready; all else goes to the least load."""

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        key = (request.content or {}).get("prompt_cache_key")
        if not isinstance(key, str):
            return min(servers, key=lambda server: server.in_flight + server.num_other)
        return max(servers, key=lambda server: hashlib.sha256(f"{server.url} {key}".encode()).digest())
