"""Responses and handlers that end when their client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
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
