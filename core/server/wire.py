"""Writes the frames of a stream directly into their connection.

The layers between a route and the connection only look at how answers start, and cost much for each message, so frames
bypass them.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope, Send

#: The scope key of a request's wire, where the HTTP protocol has one.
WIRE = "frame.wire"


class ConnectionWire:
    """The chunks of one response that has begun (`Transfer-Encoding: chunked`), over uvicorn's `cycle` of it."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def chunked(self) -> bool:
        """Whether the response has begun and is chunked; others are sent as messages."""
        return bool(self._cycle.chunked_encoding) and self._cycle.scope["method"] != "HEAD"

    def write(self, frame: bytes) -> bool:
        """Writes a frame, which is not empty; returns whether the client keeps up. Drops it after a disconnect."""
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(frame), frame))
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Waits until the client has received most of what was written, or has disconnected."""
        await self._flow.drain()


class MessageWire:
    """The same as ASGI messages, for calls inside the process and for h11."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._frame = b""

    def write(self, frame: bytes) -> bool:
        """Keeps a frame for `drain` to send."""
        self._frame = frame
        return False

    async def drain(self) -> None:
        """Sends it; waits until it has been accepted."""
        await self._send({"type": "http.response.body", "body": self._frame, "more_body": True})


def attach_wire(cycle: Any) -> None:
    """Gives a request the wire of its connection; called by the HTTP protocol once the request's head is there."""
    if cycle is not None:
        cycle.scope[WIRE] = ConnectionWire(cycle)


def wire_of(scope: Scope, send: Send) -> ConnectionWire | MessageWire:
    """The wire for the frames of a response whose head has been sent."""
    wire: ConnectionWire | None = scope.get(WIRE)
    return wire if wire is not None and wire.chunked else MessageWire(send)
