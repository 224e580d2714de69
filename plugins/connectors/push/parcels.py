"""Blocks of requests on their way to other engines, and what became of them. Knows no thread's work."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ..nixl.wire import Channel
from .messages import Goal
from .wire import Ready


@dataclass(eq=False)
class Parcel:
    """The blocks of one request on their way. `over`: nothing more is sent, as all is there, or it failed.

    `begun` is the connection on which the other side was told, and `ready` its answer.
    """

    owner: str
    goal: Goal
    over: bool = False
    begun: Channel | None = None
    ready: Ready | None = None


@dataclass
class Outcome:
    """What lanes did: requests whose blocks could not be sent, and bytes that were.

    Of these `direct_bytes` were written to other engines' memory, in so many seconds.
    """

    unsent: list[str] = field(default_factory=list)
    num_bytes: int = 0
    direct_bytes: int = 0
    direct_seconds: float = 0.0


class Notes:
    """What the threads tell the worker's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome = Outcome()

    def fail(self, parcel: Parcel) -> None:
        with self._lock:
            if not parcel.over:
                self._outcome.unsent.append(parcel.owner)
            parcel.over = True

    def sent(self, num_bytes: int, seconds: float, *, direct: bool) -> None:
        with self._lock:
            self._outcome.num_bytes += num_bytes
            if direct:
                self._outcome.direct_bytes += num_bytes
                self._outcome.direct_seconds += seconds

    def take(self) -> Outcome:
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
            return outcome
