"""Responses and handlers that end when their client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..interfaces.errors import RequestError
from .errors import error_event
from .wire import wire_of

logger = logging.getLogger("frame.server")

T = TypeVar("T")

#: Most seconds that the head of a stream waits for its first frame.
_FIRST_FRAME_SECONDS = 1.0


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


class _EarlyError(Exception):
    """An error before anything was sent."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(str(error))
        self.error = error


class EventStream(Response):
    """Server-sent events from frames that are bytes already. Always closes the generator.

    An exception of the generator becomes a last event with the error body, since status 200 was sent by then.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends frames until they end or the client disconnects."""
        with contextlib.suppress(ClientGoneError):
            await race(receive, self._pump(scope, send))

    async def _begin(self, send: Send) -> None:
        """Sends the head with the first frame, or alone when that takes long: early errors keep their status."""
        first = asyncio.ensure_future(self._next())
        try:
            await asyncio.wait([first], timeout=_FIRST_FRAME_SECONDS)
            if first.done() and isinstance(error := first.exception(), RequestError):
                raise _EarlyError(error)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_frame(await first))
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _next(self) -> bytes:
        return await anext(self._frames, b"")

    async def _pump(self, scope: Scope, send: Send) -> None:
        try:
            await self._begin(send)
            wire = wire_of(scope, send)
            async for frame in self._frames:
                if frame and not wire.write(frame):
                    await wire.drain()
        except _EarlyError as early:
            raise early.error from None
        except RequestError as error:
            await send(_frame(error_event(scope, error)))
        except Exception:
            logger.exception("a stream failed")
            await send(_frame(error_event(scope, RequestError(500, "internal error"))))
        finally:
            await self._frames.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _frame(event: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": event, "more_body": True}


def event_stream(frames: object) -> EventStream:
    """A stream of `frames`, an asynchronous generator of bytes."""
    return EventStream(cast("AsyncGenerator[bytes, None]", frames))
