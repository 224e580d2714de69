"""Ports for servers that are told theirs before they listen, or that come back to it."""

from __future__ import annotations

import random
import socket

#: Below those that systems give to whoever asks for any port: so nobody gets one of them before its server listens.
_FIRST, _LAST = 10_000, 32_000


def free_ports(count: int = 1) -> int:
    """The first of several ports in a row at which nobody listens."""
    draw = random.SystemRandom()
    for _ in range(1000):
        first = draw.randrange(_FIRST, _LAST - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")
