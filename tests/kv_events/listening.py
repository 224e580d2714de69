"""Subscribers as they are elsewhere: bare sockets of ZMQ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

Message = tuple[bytes, int, bytes]


@contextmanager
def opened(kind: int, address: str, *, bind: bool = False, context: Any = None, **options: Any) -> Iterator[Any]:
    """A socket that waits at most 60 s for a message."""
    own = context or zmq.Context()
    made = own.socket(kind)
    made.setsockopt(zmq.RCVTIMEO, 60_000)
    made.setsockopt(zmq.LINGER, 0)
    for name, value in options.items():
        made.setsockopt(getattr(zmq, name), value)
    (made.bind if bind else made.connect)(address)
    try:
        yield made
    finally:
        made.close(0)
        if context is None:
            own.term()


def received(sub: Any) -> Message:
    topic, number, payload = sub.recv_multipart()
    return topic, int.from_bytes(number, "big"), payload


def replayed(dealer: Any, start: int) -> list[tuple[int, bytes]]:
    """What a server of replays has from a number on."""
    dealer.send_multipart((b"", start.to_bytes(8, "big")))
    found = []
    while True:
        empty, number, payload = dealer.recv_multipart()
        assert empty == b""
        if number == b"\xff" * 8:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), payload))


def until_it_listens(publisher: Any, sub: Any) -> int:
    """Publishes until a subscriber gets a message; returns the number of the first that it got."""
    sub.setsockopt(zmq.RCVTIMEO, 20)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        publisher.publish([])
        try:
            number = received(sub)[1]
        except zmq.Again:
            continue
        sub.setsockopt(zmq.RCVTIMEO, 60_000)
        return number
    raise TimeoutError("the subscriber hears nothing")
