"""Streams of server-sent events, and handlers that end when their client disconnects.

The layers between a route and the connection only look at how answers start, and cost much for each message, so the
frames of a stream bypass them: they are written directly into the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..interfaces.errors import RequestError
from .errors import error_event

logger = logging.getLogger("frame.server")

T = TypeVar("T")

#: Most seconds that the head of a stream waits for its first frame.
_FIRST_FRAME_SECONDS = 1.0
#: The scope key of a request's wire, where the HTTP protocol has one.
WIRE = "frame.wire"


class ClientGoneError(Exception):
    """The client disconnected before its answer was ready."""


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def race(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits `work`; when the client disconnects, cancels it and raises `ClientGoneError`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from frames that are bytes already. Always closes the generator.

    An exception of the generator becomes a last event with the error body, since status 200 was sent by then.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = cast("AsyncGenerator[bytes, None]", frames)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends frames until they end or the client disconnects."""
        with contextlib.suppress(ClientGoneError):
            await race(receive, self._pump(scope, send))

    async def _pump(self, scope: Scope, send: Send) -> None:
        """Sends the head with the first frame, or alone when that takes long: early errors keep their status."""
        first = asyncio.create_task(self._next())
        begun = False
        try:
            await asyncio.wait([first], timeout=_FIRST_FRAME_SECONDS)
            if not (first.done() and isinstance(first.exception(), RequestError)):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                begun = True
            await send(_frame(await first))
            wire = wire_of(scope, send)
            async for frame in self._frames:
                if frame and not wire.write(frame):
                    await wire.drain()
        except RequestError as error:
            if not begun:
                raise
            await send(_frame(error_event(scope, error)))
        except Exception:
            logger.exception("a stream failed")
            await send(_frame(error_event(scope, RequestError(500, "internal error"))))
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await self._frames.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes:
        return await anext(self._frames, b"")


def _frame(event: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": event, "more_body": True}


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
    """Sends the frames of a response as ASGI messages, for calls inside the process and for h11."""

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
