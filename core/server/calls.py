"""Calls of routes from inside the process: a batch line gets the same handlers, limits and errors as an HTTP request.

The key was checked when the batch was created, so calls carry their owner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config.server import ServerConfig
from ..front.prompts import BYTES_PER_TOKEN
from ..interfaces.errors import ErrorShape, RequestError
from ..interfaces.serving import RouteAnswer
from .bodies import JSON_BODY, BodyParser, parse_json
from .deadlines import set_deadline
from .errors import ERROR_SHAPE, ErrorShapes, error_body
from .ingress import OWNER, REQUEST, TOKENS
from .keys import KeyLimits

#: The fields that bound the tokens of an answer on one route or another.
_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class RouteCalls:
    """The POST routes of an application, callable with a JSON body. `shapes` has the format of each route's errors.

    A call is a request of its own: `max_seconds` and the timeout in its body limit it, whichever task makes it. Its
    tokens count towards those of its owner; while it runs, `delay` counts those that it may use. Its outputs are not
    counted, since callers bound their own calls. `longest` says how many tokens an answer may have.
    """

    def __init__(
        self,
        app: Starlette,
        routers: Sequence[APIRouter],
        shapes: ErrorShapes,
        server: ServerConfig,
        longest: Callable[[], int],
        limits: KeyLimits | None = None,
    ) -> None:
        self._longest = longest
        self._held: Counter[str] = Counter()  # owner -> the tokens that its running calls may use
        self._app = app
        self._limits = limits if server.max_tokens_per_minute is not None else None
        self._parser = BodyParser()
        self.max_body_bytes = server.max_body_bytes
        self._max_outputs = server.max_outputs
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
        """Like `parse`; large bodies are parsed in a thread, one at a time."""
        self._check_length(body)
        return await self._parser.parse(body)

    def _check_length(self, body: bytes) -> None:
        if len(body) > self.max_body_bytes:
            raise RequestError(400, f"the line exceeds {self.max_body_bytes} bytes (--max-body-bytes)")

    def delay(self, owner: str) -> float:
        """Seconds until the owner may use tokens again (--max-tokens-per-minute); 0 while it has some left."""
        return 0.0 if self._limits is None else self._limits.delay(owner, self._held[owner])

    async def post(self, path: str, body: dict[str, Any], owner: str) -> RouteAnswer:
        """Calls the route and returns its answer; cancelling the call ends the request."""
        body = dict(body)  # copied, since a line that is tried again calls with the same body
        scope = self._scope(path, body, owner)
        status: int | None = None
        chunks: list[bytes] = []

        async def take(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            chunks.append(message.get("body", b""))

        present = REQUEST.set(scope)
        num_tokens = 0
        try:
            if self._limits is not None:
                num_tokens = self._most_tokens(body)
            self._held[owner] += num_tokens
            set_deadline(scope, body, self._max_seconds)
            await self._app(scope, _never, take)
        except RequestError as error:
            return RouteAnswer(error.status, msgspec.json.decode(error_body(scope, error)))
        except Exception:  # the failure was logged, and status 500 is the answer
            if status is None:
                return RouteAnswer(500, msgspec.json.decode(error_body(scope, RequestError(500, "internal error"))))
        finally:
            REQUEST.reset(present)
            self._held[owner] -= num_tokens
        answer = None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            answer = msgspec.json.decode(b"".join(chunks))
        return RouteAnswer(status or 500, answer)

    def _most_tokens(self, body: dict[str, Any]) -> int:
        """The most tokens that the request of an unchecked body may use; the tokens of its prompts are estimated."""
        limits = [body[name] for name in _MAX_TOKENS if isinstance(body.get(name), int) and body[name] > 0]
        prompts: Any = body.get("prompt")
        several = isinstance(prompts, list) and not all(isinstance(each, int) for each in prompts[:1])
        num_prompts = len(prompts) if several else 1
        for_each = max(body[name] if isinstance(body.get(name), int) else 1 for name in ("n", "best_of"))
        num_outputs = min(max(1, num_prompts * for_each), self._max_outputs)
        num_prompt_tokens = len(msgspec.json.encode(body)) // BYTES_PER_TOKEN
        return num_prompt_tokens + num_outputs * int(min([self._longest(), *limits]))

    def forward(self, path: str) -> ForwardedResponse:
        """The answer of the route `path` to a request that the ingress admitted under another path.

        Middleware has already seen that request.
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
            TOKENS: self._limits,
            ERROR_SHAPE: self._shapes.of(path),
        }


class ForwardedResponse(Response):
    """The answer of another route to the same request, with its key, body and deadline."""

    def __init__(self, app: ASGIApp, path: str, errors: ErrorShape) -> None:
        super().__init__()
        self._target = app
        self._changes = {"path": path, "raw_path": path.encode(), "path_params": {}, ERROR_SHAPE: errors}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request to the application, which sends the answer."""
        await self._target({**scope, **self._changes}, receive, send)


async def _never() -> Message:
    """Waits for ever: the caller sends nothing more and does not disconnect."""
    await asyncio.Event().wait()
    raise RuntimeError("unreachable")
