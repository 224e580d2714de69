"""The ingress: every HTTP request passes here before any route sees it.

Checks, in this order: the number of headers, the key, whether there is an engine to serve with, the size of the body
while it is read, and that the body is plain JSON of bounded depth. The checks apply to every route unless it is listed
as open here.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..interfaces.endpoint import KNOWN
from ..interfaces.errors import RequestError
from .deadlines import set_deadline
from .errors import ERROR_SHAPE, ErrorShapes, error_body, retry_headers
from .keys import KeyRing
from .limits import KeyLimits
from .strict_json import BodyParser
from .uploads import Uploads

#: Answered without a key and without an engine.
OPEN_PATHS = ("/health", "/live", "/ping", "/ready", "/startup")
#: Answered without an engine, but not without a key.
_EARLY_PATHS = ("/load", "/metrics", "/stats", "/version")
#: Bytes beyond the limit that are read and dropped, so that the client of too long a body reads the error.
_DROPPED_BYTES = 64 << 20
#: Most seconds for a whole JSON body, and between two pieces of any body, so that slow senders hold no place.
BODY_SECONDS, PIECE_SECONDS = 600.0, 60.0
#: The scope key of the parsed JSON body.
JSON_BODY = "frame.json"
#: The scope key of the owner: a digest of the API key, "" on a server without keys.
OWNER = "frame.owner"
#: The scope keys of the `KeyLimits` that count the outputs of a request, and of those that count its tokens.
OUTPUTS, TOKENS = "frame.outputs", "frame.tokens"
#: The HTTP request that the current task serves, for reports about its generations.
REQUEST: ContextVar[Scope | None] = ContextVar("frame_request", default=None)


class Traffic(Protocol):
    """Counts requests and answers (implemented by the metrics)."""

    def entered(self) -> None:
        """A request that needs the engine has been admitted."""

    def left(self, status: int) -> None:
        """It was answered with `status`; 0 when the client had disconnected."""

    def responded(self, status: int) -> None:
        """A response to a request that does not need the engine."""


class Ingress:
    """Pure ASGI middleware. `problem` says why nothing can be served now, None while requests are accepted."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        max_body_bytes: int,
        problem: Callable[[], str | None],
        root_path: str = "",
        request_ids: bool = False,
        shapes: ErrorShapes | None = None,
        public_paths: Sequence[str] = (),
        traffic: Traffic | None = None,
        uploads: Uploads | None = None,
        limits: KeyLimits | None = None,
        max_seconds: float | None = None,
        max_headers: int = 256,
    ) -> None:
        self._max_headers = max_headers
        self._app = app
        self._keys = KeyRing(keys)
        self._parser = BodyParser()
        self._max_body_bytes = max_body_bytes
        self._problem = problem
        #: admitted requests that have not been answered yet
        self.active = 0
        self._request_ids = request_ids
        self._shapes = shapes or ErrorShapes(())
        self._root_path = root_path.rstrip("/")
        self._traffic = traffic
        self._uploads = uploads or Uploads()
        self._limits = limits
        self._max_seconds = max_seconds
        prefixes = {"", root_path.rstrip("/")}
        self._open = frozenset(prefix + path for prefix in prefixes for path in OPEN_PATHS)
        self._public = frozenset(prefix + path for prefix in prefixes for path in public_paths)
        early = frozenset(prefix + path for prefix in prefixes for path in _EARLY_PATHS)
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
        if self._request_ids:
            send = _with_request_id(scope, send)
        done = contextlib.ExitStack()
        try:
            receive = await self._admit(scope, receive, done)
        except RequestError as error:
            if self._traffic is not None:
                self._traffic.responded(error.status)
            await respond(send, error.status, error_body(scope, error), retry_headers(error))
            return
        REQUEST.set(scope)
        self.active += 1
        try:
            if self._traffic is None:
                await self._app(scope, receive, send)
            else:
                await self._count(self._traffic, scope, receive, send)
        finally:
            self.active -= 1
            done.close()

    async def _count(self, traffic: Traffic, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves an admitted request and counts its answer by status."""
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        needs_engine = _plain_path(scope) not in self._early
        if needs_engine:
            traffic.entered()
        try:
            await self._app(scope, receive, noting)
        finally:
            (traffic.left if needs_engine else traffic.responded)(status)

    async def _admit(self, scope: Scope, receive: Receive, done: contextlib.ExitStack) -> Receive:
        """Checks a request; returns the `receive` of its body. `done` is closed when the request ends."""
        path = _plain_path(scope)
        if (number := len(scope["headers"])) > self._max_headers:
            raise RequestError(431, f"a request may have {self._max_headers} headers (--max-headers), got {number}")
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
        timely = _timely(receive)
        upload = self._uploads.admit(scope, path and path.removeprefix(self._root_path), timely)
        if upload is not None:
            self._bound(scope, done, known=owner is not None)
            return upload
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(scope, timely)
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
        if body is None:
            return receive
        if body:
            _check_type(scope)
            scope[JSON_BODY] = await self._parser.parse(body)
        self._bound(scope, done, known=owner is not None)
        return _replay(body, receive)

    def _bound(self, scope: Scope, done: contextlib.ExitStack, known: bool) -> None:
        """Sets the deadline of the request and counts it towards its key's limits; raises when a limit is reached.

        A request without a key on an open route is not counted.
        """
        set_deadline(scope, scope.get(JSON_BODY), self._max_seconds)
        if self._limits is not None and known:
            scope[OUTPUTS] = scope[TOKENS] = self._limits
            done.enter_context(self._limits.admit(scope[OWNER]))

    def _is_open(self, method: str, path: str | None) -> bool:
        return path in self._open or method == "OPTIONS" or (method in ("GET", "HEAD") and path in self._public)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None when the client disconnects. A body that is too long is dropped while it is read."""
        limit = self._max_body_bytes
        announced = max((int(value) for name, value in scope["headers"] if _is_length(name, value)), default=0)
        too_long = announced > limit
        chunks: list[bytes] = []
        size = 0
        # most clients read no answer before they have sent everything, so the rest is read and dropped
        while announced <= limit + _DROPPED_BYTES and size <= limit + _DROPPED_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            if too_long := too_long or size > limit:
                chunks.clear()
            else:
                chunks.append(chunk)
            if not message.get("more_body", False):
                break
        if too_long:
            raise RequestError(413, f"the body exceeds {limit} bytes (--max-body-bytes)")
        return b"".join(chunks)


def _timely(receive: Receive) -> Receive:
    """A `receive` that bounds the wait for each piece of the body, but not that for the disconnect."""
    more = True

    async def timely() -> Message:
        nonlocal more
        if not more:
            return await receive()
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                message = await receive()
        except TimeoutError:
            raise RequestError(408, f"no piece of the body arrived for {PIECE_SECONDS:g} seconds") from None
        more = message.get("more_body", False)
        return message

    return timely


def _is_length(name: bytes, value: bytes) -> bool:
    return name == b"content-length" and value.isdigit() and len(value) < 20


def _plain_path(scope: Scope) -> str | None:
    """The path, when what the client sent and what the router sees are the same; None for percent-encoded forms."""
    path: str = scope["path"]
    raw = scope.get("raw_path")
    return path if raw is None or raw == path.encode() else None


def _check_type(scope: Scope) -> None:
    """Refuses other types than JSON, which browsers may send across origins without a preflight request."""
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.split(b";")[0].strip().lower()
            if kind == b"application/json" or kind.endswith(b"+json"):
                return
    raise RequestError(415, "the body must be JSON: send Content-Type: application/json")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then reads from the connection, which reports a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


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
