"""A route policy: prompts of token ids go where most of them was cached last; others to the least load."""

from collections.abc import Sequence

from frame.interfaces import KVChange, KVCleared, KVStored, RoutePolicy, RouteRequest, RouteServer, Setup


class ToldPolicy(RoutePolicy):
    """Remembers who cached the first block of a prompt last."""

    def __init__(self, setup: Setup, options: None = None) -> None:
        super().__init__(setup, options)
        self._holders: dict[tuple[int, ...], str] = {}

    def kv_changed(self, server: str, rank: int, change: KVChange) -> None:
        if isinstance(change, KVStored) and change.parent is None and len(self._holders) < 100_000:
            self._holders[tuple(change.tokens[: change.block_size])] = server
        elif isinstance(change, KVCleared):
            self._holders = {block: one for block, one in self._holders.items() if one != server}

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        prompt = (request.content or {}).get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            holder = self._holders.get(tuple(prompt[:16]))
            for server in servers:
                if server.url == holder:
                    return server
        return min(servers, key=lambda server: server.in_flight + server.num_other)
