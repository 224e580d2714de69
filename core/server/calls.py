"""Calls of routes from inside the process: a batch line meets the same handlers, bounds and errors as a request.

The key was checked where the batch came in, so calls carry their owner. Knows no route.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config.server import ServerConfig
from ..interfaces.errors import ErrorShape, RequestError
from ..interfaces.serving import RouteAnswer
from .deadlines import set_deadline
from .errors import ERROR_SHAPE, ErrorShapes, error_body
from .ingress import JSON_BODY, OWNER, REQUEST
from .strict_json import BodyParser, parse_json


class RouteCalls:
    """The POST routes of an application, callable with a JSON body. `shapes` are those of its errors.

    A call is a request of its own: `max_seconds` and what its body asks for bound it, whatever the task that makes it.
    """

    def __init__(self, app: Starlette, routers: Sequence[APIRouter], shapes: ErrorShapes, server: ServerConfig) -> None:
        self._app = app
        self._parser = BodyParser()
        self.max_body_bytes = server.max_body_bytes
        self._shapes = shapes
        self._max_seconds = server.max_request_seconds
        routes = [route for router in routers for route in router.routes if isinstance(route, Route)]
        #: paths without parameters
        self.paths = sorted(
            {route.path for route in routes if "POST" in (route.methods or ()) and "{" not in route.path}
        )

    def parse(self, body: bytes) -> Any:
        """The JSON of a body; raises `RequestError` 400."""
        self._check_length(body)
        return parse_json(body)

    async def read(self, body: bytes) -> Any:
        """As `parse`; large ones in a thread, one at a time."""
        self._check_length(body)
        return await self._parser.parse(body)

    def _check_length(self, body: bytes) -> None:
        if len(body) > self.max_body_bytes:
            raise RequestError(400, f"the line exceeds {self.max_body_bytes} bytes (--max-body-bytes)")

    async def post(self, path: str, body: dict[str, Any], owner: str) -> RouteAnswer:
        """What the route answers; cancelling it ends the request."""
        body = dict(body)  # the same line may be called again
        scope = self._scope(path, body, owner)
        reply = _Reply()
        present = REQUEST.set(scope)
        try:
            set_deadline(scope, body, self._max_seconds)
            await self._app(scope, _never, reply.take)
        except RequestError as error:
            return RouteAnswer(error.status, msgspec.json.decode(error_body(scope, error)))
        except Exception:  # it has been answered with 500 and logged
            if reply.status is None:
                return RouteAnswer(500, msgspec.json.decode(error_body(scope, RequestError(500, "internal error"))))
        finally:
            REQUEST.reset(present)
        return reply.answer()

    def forward(self, path: str) -> ForwardedResponse:
        """What the route `path` answers to a request that the ingress has let in by another path.

        Middleware has met that request already.
        """
        return ForwardedResponse(self._app.router, path, self._shapes.of(path))

    def _scope(self, path: str, body: dict[str, Any], owner: str) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            JSON_BODY: body,
            OWNER: owner,
            ERROR_SHAPE: self._shapes.of(path),
        }


class ForwardedResponse(Response):
    """What another route answers to the same request; its key, body and deadline stay as they are."""

    def __init__(self, app: ASGIApp, path: str, errors: ErrorShape) -> None:
        super().__init__()
        self._target = app
        self._changes = {"path": path, "raw_path": path.encode(), "path_params": {}, ERROR_SHAPE: errors}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Asks the application, which answers by itself."""
        await self._target({**scope, **self._changes}, receive, send)


async def _never() -> Message:
    """The caller sends nothing more and does not hang up."""
    await asyncio.Event().wait()
    raise RuntimeError("unreachable")


class _Reply:
    def __init__(self) -> None:
        self.status: int | None = None
        self._chunks: list[bytes] = []

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self._chunks.append(message.get("body", b""))

    def answer(self) -> RouteAnswer:
        body = None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            body = msgspec.json.decode(b"".join(self._chunks))
        return RouteAnswer(self.status or 500, body)
