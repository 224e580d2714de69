"""The ingress: every HTTP request passes here before any route sees it.

Checks, in this order: the number of headers, the key, whether there is an engine to serve with, the body while it is
read, and the limits of the key. The checks apply to every route unless it is listed as open here.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from types import MappingProxyType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config.server import ServerConfig
from ..interfaces.endpoint import KNOWN
from ..interfaces.errors import RequestError
from .bodies import JSON_BODY, Bodies
from .deadlines import set_deadline
from .errors import ERROR_SHAPE, ErrorShapes, error_body, retry_headers
from .keys import KeyLimits, KeyRing
from .metrics import ServerMetrics

#: Answered without a key and without an engine.
OPEN_PATHS = ("/health", "/live", "/ping", "/ready", "/startup")
#: Answered without an engine, but not without a key.
_EARLY_PATHS = ("/load", "/metrics", "/stats", "/version")
#: The scope key of the owner: a digest of the API key, "" on a server without keys.
OWNER = "frame.owner"
#: The scope keys of the `KeyLimits` that count the outputs of a request, and of those that count its tokens.
OUTPUTS, TOKENS = "frame.outputs", "frame.tokens"
#: The HTTP request that the current task serves, for reports about its generations.
REQUEST: ContextVar[Scope | None] = ContextVar("frame_request", default=None)


class Ingress:
    """Pure ASGI middleware with the keys and bounds of `server`.

    `problem` says why nothing can be served now, None while requests are accepted. GET of `public_paths` needs no key;
    POST to `uploads` may send files. `traffic` counts requests, `limits` bounds those of each key.
    """

    def __init__(
        self,
        app: ASGIApp,
        server: ServerConfig,
        problem: Callable[[], str | None],
        *,
        shapes: ErrorShapes | None = None,
        public_paths: Collection[str] = (),
        uploads: Collection[str] = (),
        traffic: ServerMetrics | None = None,
        limits: KeyLimits | None = None,
    ) -> None:
        self._app = app
        self._server = server
        self._keys = KeyRing(server.api_key)
        self._problem = problem
        self._shapes = shapes or ErrorShapes(())
        self._bodies = Bodies(server, uploads)
        self._traffic = traffic or ServerMetrics()
        self._limits = limits
        #: admitted requests that have not been answered yet
        self.active = 0
        self._root_path = server.root_path.rstrip("/")
        self._open, self._public, early = (
            frozenset((*paths, *(self._root_path + path for path in paths)))
            for paths in (OPEN_PATHS, public_paths, _EARLY_PATHS)
        )
        self._early = early | self._open | self._public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; lifespan events pass through, anything else is closed."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        scope[ERROR_SHAPE] = self._shapes.of(scope["path"].removeprefix(self._root_path))
        if self._server.enable_request_id_headers:
            send = _with_request_id(scope, send)
        with contextlib.ExitStack() as until_answered:
            try:
                receive = await self._admit(scope, receive, until_answered)
            except RequestError as error:
                self._traffic.responded(error.status)
                await respond(send, error.status, error_body(scope, error), retry_headers(error))
            else:
                await self._serve(scope, receive, send)
            finally:
                scope.pop(JSON_BODY, None)  # connections are cycles, which the collector meets late

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves an admitted request and counts its answer by status."""
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        REQUEST.set(scope)
        needs_engine = _plain_path(scope) not in self._early
        if needs_engine:
            self._traffic.entered()
        self.active += 1
        try:
            await self._app(scope, receive, noting)
        finally:
            self.active -= 1
            (self._traffic.left if needs_engine else self._traffic.responded)(status)

    async def _admit(self, scope: Scope, receive: Receive, until_answered: contextlib.ExitStack) -> Receive:
        """Checks a request and returns the `receive` of its body; its key counts it until `until_answered` ends."""
        path = _plain_path(scope)
        most = self._server.max_headers
        if (number := len(scope["headers"])) > most:
            raise RequestError(431, f"a request may have {most} headers (--max-headers), got {number}")
        method = scope["method"]
        owner = self._keys.owner(scope["headers"])
        scope[OWNER] = owner or ""
        scope[KNOWN] = owner is not None and path not in self._open
        if owner is None and not self._is_open(method, path):
            raise RequestError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        problem = None if path in self._early else self._problem()
        if problem is not None:
            raise RequestError(503, problem)
        if method in ("GET", "HEAD", "OPTIONS"):
            return receive
        admitted = await self._bodies.admit(scope, path and path.removeprefix(self._root_path), receive)
        if admitted is None:  # the client has left, and its key pays for nothing
            return receive
        set_deadline(scope, scope.get(JSON_BODY), self._server.max_request_seconds)
        if self._limits is not None and owner is not None:  # a request without a key on an open route is not counted
            scope[OUTPUTS] = scope[TOKENS] = self._limits
            until_answered.enter_context(self._limits.admit(owner))
        return admitted

    def _is_open(self, method: str, path: str | None) -> bool:
        return path in self._open or method == "OPTIONS" or (method in ("GET", "HEAD") and path in self._public)


def _plain_path(scope: Scope) -> str | None:
    """The path, when what the client sent and what the router sees are the same; None for percent-encoded forms."""
    path: str = scope["path"]
    raw = scope.get("raw_path")
    return path if raw is None or raw == path.encode() else None


def _with_request_id(scope: Scope, send: Send) -> Send:
    """Echoes X-Request-Id, or makes one up."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    name = given if 0 < len(given) <= 128 and given.isascii() else uuid.uuid4().hex.encode()

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name)]}
        await send(message)

    return send_with_id


async def respond(send: Send, status: int, body: bytes, more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Sends a JSON response and ends it."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (408, 413, 431):
        headers.append((b"connection", b"close"))
    headers += [(name.encode(), value.encode()) for name, value in more.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
