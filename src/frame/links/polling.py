"""Waits for sockets of any number: `select.select` knows none above 1,023, which a process with many clients has."""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasDescriptor(Protocol):
    """A socket, or what wraps one."""

    def fileno(self) -> int:
        """Its descriptor."""


S = TypeVar("S", bound=HasDescriptor)

#: Seconds; poll knows no more milliseconds than an int of C.
_DAY = 86_400.0


def wait_for(
    readable: Sequence[S], writable: Sequence[S] = (), seconds: float | None = None
) -> tuple[list[S], list[S]]:
    """Those of `readable` from which something comes, or the end, and of `writable` that take something.

    Returns as soon as there is one, or after `seconds`, a day at most; None: it waits for ever.
    """
    events = {one.fileno(): 0 for one in (*readable, *writable)}
    for one in readable:
        events[one.fileno()] |= select.POLLIN
    for one in writable:
        events[one.fileno()] |= select.POLLOUT
    poll = select.poll()
    for descriptor, event in events.items():
        poll.register(descriptor, event)
    found = dict(poll.poll(None if seconds is None else math.ceil(min(max(0.0, seconds), _DAY) * 1000)))
    # the end and errors of a connection are there to be read
    return (
        [one for one in readable if found.get(one.fileno(), 0) & ~select.POLLOUT],
        [one for one in writable if found.get(one.fileno(), 0) & ~select.POLLIN],
    )
