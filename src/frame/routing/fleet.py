"""The servers that a front knows: who is ready, what each has under way, and what has been counted of each."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from .policy import ServerRole
from .server_list import ListedServer

#: Bounds in seconds of the histogram of times to the beginning of an answer.
HEAD_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
#: Kinds of answers that are counted: their status by hundreds, from 1xx to 5xx.
_CLASSES = 5


class FleetServer:
    """One server: as the list names it, as it was found last, and what it was asked. Policies see it as it is.

    `problem` says why it gets no requests; None while it is ready.
    """

    def __init__(self, entry: ListedServer) -> None:
        self.url = entry.url
        self.role: ServerRole = entry.role
        self.draining = entry.draining
        self.kv_events = entry.kv_events
        self.problem: str | None = "it has not been asked yet"
        #: set when the list names it no more
        self.removed = False
        self.in_flight = 0
        self.num_other = 0
        self.kv_usage: float | None = None
        #: answers by their status's hundreds
        self.answers = [0] * _CLASSES
        #: attempts that ended before an answer began, and answers that broke off
        self.failures = 0
        self.broken = 0
        #: prompts that it computed for other servers
        self.prefills = 0
        #: those of them of which it has not said where their KV is
        self.prefills_without_kv = 0
        self.head_counts = [0] * (len(HEAD_BOUNDS) + 1)
        self.head_seconds = 0.0

    @property
    def usable(self) -> bool:
        """Whether it gets new requests."""
        return self.problem is None and not self.draining and not self.removed

    @property
    def state(self) -> str:
        """One word for people."""
        if self.removed or self.draining:
            return "draining" if self.in_flight else "drained"
        return "ready" if self.problem is None else "unready"

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a request as under way there."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def answered(self, status: int, seconds: float) -> None:
        """Counts an answer that began so many seconds after the request was sent."""
        self.answers[min(max(status // 100, 1), _CLASSES) - 1] += 1
        self.head_counts[bisect.bisect_left(HEAD_BOUNDS, seconds)] += 1
        self.head_seconds += seconds

    def reported(self, total: int, kv_usage: float | None, own: int = 0) -> None:
        """Notes how many requests the server says that it has; it had `own` of this front when it was asked."""
        self.num_other = max(0, total - max(own, self.in_flight))
        self.kv_usage = kv_usage


class Fleet:
    """All servers, in the order of the list. `problem` says what is wrong with the newest list, if that is not used.

    `fetches_kv`: servers have got KV from others, since some list had servers for prompts only. `on_change` is called
    when the list has changed.
    """

    def __init__(self, entries: Sequence[ListedServer]) -> None:
        self.servers: list[FleetServer] = []
        self.problem: str | None = None
        self.fetches_kv = False
        self.on_change: Callable[[], None] = lambda: None
        self.started = time.time()
        self.apply(entries)

    def apply(self, entries: Sequence[ListedServer]) -> None:
        """Follows a new list: servers that it has no more get no new requests, and are forgotten once they are idle."""
        known = {server.url: server for server in self.servers}
        servers = []
        for entry in entries:
            server = known.pop(entry.url, None) or FleetServer(entry)
            server.role, server.draining, server.removed = entry.role, entry.draining, False
            server.kv_events = entry.kv_events
            servers.append(server)
        for server in known.values():
            server.removed = True
        self.servers = [*servers, *(server for server in known.values() if server.in_flight)]
        self.fetches_kv = self.fetches_kv or any(entry.role == "prefill" for entry in entries)
        self.on_change()

    def forget_idle(self) -> None:
        """Drops servers that the list has no more and that have ended what they had under way."""
        self.servers = [server for server in self.servers if not server.removed or server.in_flight]

    def usable(self, role: ServerRole, tried: Collection[FleetServer] = ()) -> list[FleetServer]:
        """The servers of a role that get new requests, without those that have been `tried`."""
        return [server for server in self.servers if server.role == role and server.usable and server not in tried]

    @property
    def why_not(self) -> str | None:
        """Why no request can be served; None while one server at least is ready for it. Names no address."""
        there = [server for server in self.servers if server.role == "serve"]
        if any(server.usable for server in there):
            return None
        return f"none of {len(there)} servers is ready" if len(there) != 1 else "the server is not ready"
