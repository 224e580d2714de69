"""The HTTP/1.1 protocol under the application: uvicorn's, with a bound on the bytes of a request's head."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ..config.server import ServerConfig
from .certificates import Certificates
from .event_stream import attach_wire

_KEEP_ALIVE_SECONDS = 30
#: Seconds from the first byte of a request's head (for the first request, from the connection) until it is complete.
HEAD_SECONDS = 60.0
#: Seconds that open connections get when the server ends.
_SHUTDOWN_SECONDS = 2
#: Polled by probes, collectors and the page; their requests are not logged.
_POLLED = frozenset(("/health", "/live", "/ping", "/ready", "/startup", "/metrics", "/load", "/stats", "/fleet"))


class Server(uvicorn.Server):
    """Leaves signals to its owner, and looks for renewed files of its `certificates` once a second."""

    certificates: Certificates | None = None

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; returns whether to end."""
        if self.certificates is not None and counter % 10 == 0:
            self.certificates.look()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def make_server(app: ASGIApp, config: ServerConfig, tls: Certificates | None = None) -> Server:
    """A server for `app`, over TLS where there are certificates; `serve(sockets=[…])` runs it until `should_exit`."""
    level = config.uvicorn_log_level or config.log_level
    settings = uvicorn.Config(
        app,
        http="h11" if importlib.util.find_spec("httptools") is None else _protocol(config.max_head_bytes),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        log_level=level,
        access_log=not config.disable_access_log,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=config.max_head_bytes,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    own = logging.getLogger("uvicorn")
    own.handlers.clear()
    own.parent = logging.getLogger("frame")  # one format for all lines
    logging.getLogger("uvicorn.access").addFilter(_access_line)
    if level == "info" and config.uvicorn_log_level is None:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # uvicorn's lines on start and end repeat ours
    server = Server(settings)
    if tls is not None and config.enable_ssl_refresh:
        server.certificates = tls
    return server


def _access_line(record: logging.LogRecord) -> bool:
    """Takes the query out of a record of uvicorn's access log, since clients put keys there.

    Drops the record of a polled path unless it failed; 503 is what probes get until the engine is ready.
    """
    match record.args:
        case (client, method, str(target), protocol, int(status)):
            path = target.partition("?")[0]
            record.args = (client, method, path, protocol, status)
            return path not in _POLLED or (status >= 400 and status != 503)
    return True


def _has_no_body(headers: list[tuple[bytes, bytes]]) -> bool:
    """Asked of a request for another protocol, whose body the parser would read as requests; raises, for a 400."""
    if any(name in (b"content-length", b"transfer-encoding") and value.strip(b"0") for name, value in headers):
        raise ValueError("a request with a body asks for another protocol")
    return True


def _protocol(max_head_bytes: int) -> Any:
    """The protocol of httptools, which parses in C, with the bounds on the head of a request that it lacks.

    A read that ends a head may contain more bytes than the limit.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedProtocol(HttpToolsProtocol):
        """Cuts a connection off whose request head does not end within `max_head_bytes` and a minute."""

        _head_bytes = 0
        _in_body = False
        _clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Starts the clock for the first request's head."""
            super().connection_made(transport)
            self._clock = self.loop.call_later(HEAD_SECONDS, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            """Stops the clock."""
            self._stop_clock()
            super().connection_lost(exc)

        def _stop_clock(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

        def data_received(self, data: bytes) -> None:
            """Counts what arrives before the head of a request is complete."""
            if not self._in_body:
                self._head_bytes += len(data)
            super().data_received(data)
            if not self._in_body and self._head_bytes > max_head_bytes and not self.transport.is_closing():
                self.send_400_response(f"The head of a request exceeds {max_head_bytes} bytes.")

        def on_message_begin(self) -> None:
            """Starts the clock for the head of a further request."""
            if self._clock is None:
                self._clock = self.loop.call_later(HEAD_SECONDS, self.transport.close)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            """Stops the clock: the rest is body, which the ingress bounds."""
            self._in_body = True
            self._stop_clock()
            upgrade = self.parser.should_upgrade() and _has_no_body(self.headers)
            super().on_headers_complete()
            self.cycle.keep_alive &= not upgrade
            attach_wire(self.cycle)

        def on_message_complete(self) -> None:
            """Counts the next bytes as a new head."""
            self._in_body = False
            self._head_bytes = 0
            super().on_message_complete()

    return BoundedProtocol
