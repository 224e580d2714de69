"""The HTTP application of `frame route`: keys and bounds, the front's own routes, and all others forwarded.

Its own routes are `/health`, `/live`, `/ready`, `/metrics`, `/fleet`, and the page at `/`; the servers' routes of these
names cannot be reached through it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.types import Receive, Scope, Send

from frame.anthropic_errors import AnthropicErrors
from frame.core.interfaces.errors import ErrorShape, RequestError
from frame.core.server.errors import ERROR_SHAPE, error_body, retry_headers
from frame.core.server.ingress import respond
from frame.core.server.keys import KeyRing
from frame.quoting import quoted

from .bodies import announced
from .metrics import FleetCollector
from .page import PageFile

if TYPE_CHECKING:
    from frame.core.config.server import ServerConfig

    from .fleet import Fleet
    from .forwarding import Forwarding

#: Answered without a key.
_OPEN = ("/health", "/live", "/ping", "/ready")
_Handler = Callable[[Scope, Send], Awaitable[None]]
_OPENAI, _ANTHROPIC = ErrorShape(), AnthropicErrors()


class Front:
    """An ASGI application. `server` has its keys and bounds; `about` is what /fleet says beside the servers.

    `figures` are what the policy has counted. While it is `draining`, new requests are refused.
    """

    def __init__(
        self,
        server: ServerConfig,
        fleet: Fleet,
        forwarding: Forwarding,
        pages: Mapping[str, PageFile],
        about: Mapping[str, Any],
        figures: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._server = server
        self._keys = KeyRing(server.api_key)
        self._fleet = fleet
        self._forwarding = forwarding
        self._pages = pages
        self._about = about
        self._figures = figures
        self._refused: Counter[int] = Counter()
        self._metrics = CollectorRegistry()
        self._metrics.register(FleetCollector(fleet, self._refused, figures))
        self._own: Mapping[str, _Handler] = {
            **dict.fromkeys(("/health", "/ready", "/ping"), self._health),
            "/live": self._live,
            "/metrics": self._expose,
            "/fleet": self._show,
        }
        self._open = frozenset((*_OPEN, *pages, *(["/metrics"] if server.public_metrics else [])))
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        scope[ERROR_SHAPE] = _ANTHROPIC if scope["path"].startswith("/v1/messages") else _OPENAI
        try:
            own = self._admit(scope)
            if own is not None:
                await own(scope, send)
                return
            await self._forwarding.serve(scope, receive, send)
        except RequestError as error:
            self._refused[error.status] += 1
            await respond(send, error.status, error_body(scope, error), retry_headers(error))

    def _admit(self, scope: Scope) -> _Handler | None:
        """The front's own route of a request, None for one that is forwarded; raises `RequestError` for any other."""
        most = self._server.max_headers
        if (number := len(scope["headers"])) > most:
            raise RequestError(431, f"a request may have {most} headers (--max-headers), got {number}")
        path, method = scope["path"], scope["method"]
        reads = method in ("GET", "HEAD")
        # of what the client sent, not of what it means: /%68ealth is no route of the front
        plain: str = path if scope.get("raw_path") in (None, path.encode()) else ""
        # a browser's question of OPTIONS carries neither a key nor a body
        is_open = (method == "OPTIONS" and not _has_body(scope)) or (reads and plain in self._open)
        if not is_open and self._keys.owner(scope["headers"]) is None:
            raise RequestError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if plain in self._pages and reads:
            return self._pages[plain].answer
        if plain in self._own:
            if not reads:
                raise RequestError(405, f"method {method[:20]} is not allowed on {quoted(plain)}")
            return self._own[plain]
        if path in self._own:
            raise RequestError(404, f"{quoted(path)} is a route of the front, and must be written so")
        if method == "TRACE":  # which has a server show what it got, its key among it
            raise RequestError(405, "method TRACE is not allowed")
        if self.draining:
            raise RequestError(503, "the front is stopping")
        return None

    async def _health(self, scope: Scope, send: Send) -> None:
        """Status 200 while requests can be forwarded, else 503 with the reason."""
        problem = "the front is stopping" if self.draining else self._fleet.why_not
        if problem is not None:
            raise RequestError(503, problem)
        await self._live(scope, send)

    async def _live(self, scope: Scope, send: Send) -> None:
        """Status 200 whenever this process answers."""
        await _reply(scope, send, b"", {})

    async def _expose(self, scope: Scope, send: Send) -> None:
        accept = next((value for name, value in scope["headers"] if name == b"accept"), b"").decode("latin-1")
        encode, kind = choose_encoder(accept)
        await _reply(scope, send, encode(self._metrics), {b"content-type": kind.encode()})

    async def _show(self, scope: Scope, send: Send) -> None:
        """The servers as they are now, as JSON, for the page and for programs."""
        servers = [
            {
                "url": server.url,
                "role": server.role,
                "state": server.state,
                "problem": server.problem,
                "in_flight": server.in_flight,
                "other": server.num_other,
                "kv_usage": server.kv_usage,
                "answers": dict(zip(("1xx", "2xx", "3xx", "4xx", "5xx"), server.answers, strict=True)),
                "failures": server.failures,
                "broken": server.broken,
                "prefills": server.prefills,
                "prefills_without_kv": server.prefills_without_kv,
            }
            for server in self._fleet.servers
        ]
        now = time.time()
        about = {
            **self._about,
            "figures": dict(self._figures()),
            "time": now,
            "started": self._fleet.started,
            "problem": self._fleet.problem,
        }
        body = msgspec.json.encode({**about, "draining": self.draining, "servers": servers})
        await _reply(scope, send, body, {b"content-type": b"application/json", b"cache-control": b"no-store"})


def _has_body(scope: Scope) -> bool:
    return bool(announced(scope)) or any(name == b"transfer-encoding" for name, _ in scope["headers"])


async def _reply(scope: Scope, send: Send, body: bytes, headers: Mapping[bytes, bytes]) -> None:
    length = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": [*headers.items(), *length]})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
