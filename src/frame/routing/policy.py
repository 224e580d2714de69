"""A route policy: which of several servers gets a request. Knows no connection: a simulation can ask it, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from frame.core.interfaces.errors import RequestError

if TYPE_CHECKING:
    from frame.core.interfaces.setup import Setup
    from frame.kv_events.changes import KVChange

#: What a server of the list is for: requests from beginning to end, or prompts only, whose KV others fetch.
ServerRole = Literal["serve", "prefill"]


class RouteServer(Protocol):
    """What a policy may read of a server. It changes while requests come and go.

    `in_flight` counts the requests that this front has under way there; `num_other` those that came by other ways, as
    far as the server has said. `kv_usage` is the used share of its KV cache, 0 to 1; None where it has not said.
    """

    @property
    def url(self) -> str: ...

    @property
    def role(self) -> ServerRole: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def num_other(self) -> int: ...

    @property
    def kv_usage(self) -> float | None: ...


class RouteRequest:
    """A request: the path without its query, and the body as the client sent it, b"" for one that is not kept.

    `tokens` are the ids of the prompt, once a policy's `prepare` has found them out; None where they are not known.
    """

    def __init__(self, path: str, body: bytes = b"") -> None:
        self.path = path
        self.body = body
        self.tokens: Sequence[int] | None = None

    @property
    def content(self) -> dict[str, Any] | None:
        """The body as JSON, read when it is first asked for.

        None where it is no JSON object, or has more parts than `frame serve` reads: they would hold up all requests.
        """
        found = self._parsed[0] if self._parsed else None
        return found if isinstance(found, dict) else None

    @property
    def is_json(self) -> bool:
        """Whether the body can be read, as `frame serve` reads bodies."""
        return bool(self._parsed)

    @cached_property
    def _parsed(self) -> tuple[Any, ...]:
        """What the body means; empty where that cannot be read."""
        from frame.core.server.bodies import parse_json

        try:
            return (parse_json(self.body),)
        except RequestError:
            return ()


class Route(NamedTuple):
    """The server that answers, and the one that computes the prompt for it; None where the first does that itself."""

    server: RouteServer
    prefill: RouteServer | None = None


#: Posts a body to a path of a server, as the client whose request is prepared; None where the server has no answer
#: of status 200.
Ask: TypeAlias = Callable[[RouteServer, str, bytes], Awaitable[bytes | None]]


class RoutePolicy(ABC):
    """Built as `Class(setup, options)`, once, by `frame route`. Called from its event loop for every request.

    It must answer at once and change nothing that it is given. It may remember what it answered.
    """

    #: whether `prepare` does anything
    prepares = False

    def __init__(self, setup: Setup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @abstractmethod
    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        """Returns one of `servers`, which is not empty: they have the same role, are ready, and have not failed yet."""

    def route(self, request: RouteRequest, servers: Sequence[RouteServer], prefills: Sequence[RouteServer]) -> Route:
        """Returns who serves the request, of `servers`, which is not empty, and who computes its prompt, of `prefills`.

        `prefills` is empty where there are none and for requests whose prompts cannot be computed apart. By default
        `choose` is asked for each of the two. Called again, with fewer servers, when one has failed.
        """
        return Route(self.choose(request, servers), self.choose(request, prefills) if prefills else None)

    async def prepare(  # noqa: B027 - most need not
        self, request: RouteRequest, servers: Sequence[RouteServer], ask: Ask
    ) -> None:
        """Finds out `request.tokens`, once before a request that is posted is routed, where `prepares`; it may wait."""

    def kv_changed(self, server: str, rank: int, change: KVChange) -> None:  # noqa: B027 - most do not listen
        """Learns what the prefix cache of a data rank of the server with the address `server` has gained or lost.

        Called for servers whose KV events are followed, in their order, from a thread, while other methods run.
        `KVCleared` comes for a rank that is followed no more, too.
        """

    def figures(self) -> Mapping[str, float]:
        """What the policy has counted, by names of lower case, for metrics and the page."""
        return {}
