"""The last step of a stream's frames: into their connection.

What stands between a route and the connection only looks at how answers start, and asks a good deal for each message;
so frames go past all of it. Knows no route.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope, Send

#: The wire of a request lies in its scope under this name, where the HTTP protocol has one.
WIRE = "frame.wire"


class ConnectionWire:
    """The chunks of one response that has begun (`Transfer-Encoding: chunked`), over uvicorn's `cycle` of it."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def chunked(self) -> bool:
        """Whether the response has begun and is of this kind; others are sent as messages."""
        return bool(self._cycle.chunked_encoding) and self._cycle.scope["method"] != "HEAD"

    def write(self, frame: bytes) -> bool:
        """Takes a frame, which is not empty; returns whether the client keeps up. Dropped once the client has left."""
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(frame), frame))
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Waits until the client has taken most of what was written, or has left."""
        await self._flow.drain()


class MessageWire:
    """The same as messages, for what has no connection of its own: calls inside the process, h11."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._frame = b""

    def write(self, frame: bytes) -> bool:
        """Takes a frame for `drain` to send."""
        self._frame = frame
        return False

    async def drain(self) -> None:
        """Sends it; waits as long as the one who takes it does."""
        await self._send({"type": "http.response.body", "body": self._frame, "more_body": True})


def attach_wire(cycle: Any) -> None:
    """Gives a request the wire of its connection; called by the HTTP protocol once the request's head is there."""
    if cycle is not None:
        cycle.scope[WIRE] = ConnectionWire(cycle)


def wire_of(scope: Scope, send: Send) -> ConnectionWire | MessageWire:
    """Where the frames of a response go after its head has been sent."""
    wire: ConnectionWire | None = scope.get(WIRE)
    return wire if wire is not None and wire.chunked else MessageWire(send)
