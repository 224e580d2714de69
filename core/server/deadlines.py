"""The deadline of a request: from `X-Request-Timeout`, the field `timeout`, and the server's limit.

Ends generations at their deadline, and admin requests as a whole.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from frame.quoting import quoted

from ..interfaces.errors import RequestError
from .errors import error_body

T = TypeVar("T")

#: (moment by the loop's clock, seconds) lies in the scope under this name.
DEADLINE = "frame.deadline"
_HEADER = b"x-request-timeout"
_FIELD = "timeout"


def set_deadline(scope: Scope, body: Any, most: float | None) -> None:
    """Sets the deadline of a request and removes the field; raises `RequestError` 400 for an invalid value."""
    header = next((value for name, value in scope["headers"] if name == _HEADER), None)
    asked: Any = header.decode("latin-1") if header is not None else None
    where = "X-Request-Timeout" if header is not None else _FIELD
    if isinstance(body, dict) and _FIELD in body:
        field = body.pop(_FIELD)
        asked = field if asked is None else asked
    seconds = None if asked is None else _seconds(asked, where)
    if most is not None:
        seconds = min(most, seconds if seconds is not None else most)
    if seconds is not None:
        scope[DEADLINE] = asyncio.get_running_loop().time() + seconds, seconds


def _seconds(asked: Any, where: str) -> float:
    try:
        seconds = math.nan if isinstance(asked, bool) else float(asked)
    except (TypeError, ValueError, OverflowError):  # OverflowError: an integer of hundreds of digits
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(400, f"{where} must be a number of seconds above 0, got {quoted(asked)}", param=where)
    return seconds


def until_deadline(stream: AsyncGenerator[T, None], scope: Scope | None) -> AsyncGenerator[T, None]:
    """The stream of an HTTP request; raises `RequestError` 504 at its deadline."""
    deadline = scope.get(DEADLINE) if scope is not None else None
    return stream if deadline is None else _cut(stream, *deadline)


async def _cut(stream: AsyncGenerator[T, None], moment: float, seconds: float) -> AsyncGenerator[T, None]:
    while True:
        try:
            async with asyncio.timeout_at(moment):
                item = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _too_late(seconds) from None
        yield item


def _too_late(seconds: float, more: str = "") -> RequestError:
    text = f"the request did not end within its {seconds:g} seconds{more}"
    return RequestError(504, text, code="deadline_exceeded")


class Deadlines:
    """ASGI middleware for routes that answer in one piece: cancels those that miss their deadline.

    The answer waits while a cancelled route cleans up in the engine.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or answers 504."""
        moment, seconds = scope.get(DEADLINE, (None, math.inf))
        limit = asyncio.timeout_at(moment)
        try:
            async with limit:
                await self._app(scope, receive, send)
        except TimeoutError:
            if not limit.expired():
                raise
            error = _too_late(seconds, "; its work in the engine may continue")
            answer = Response(error_body(scope, error), error.status, media_type="application/json")
            await answer(scope, receive, send)
