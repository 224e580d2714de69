"""The client side of a front: one pool of connections to all servers. Passes heads and bodies on as they are.

The only file that imports aiohttp, which is imported when the front starts.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import ssl
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from frame.links.lost import end_when_lost

if TYPE_CHECKING:
    from aiohttp import ClientResponse

Headers = Iterable[tuple[bytes, bytes]]

#: Headers between two neighbours; those that `Connection` names are, too. The length is that of the body that is sent.
_HOP = frozenset((
    b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect",
    b"host", b"content-length", b"proxy-authenticate", b"proxy-authorization",
))  # fmt: skip
#: Of answers, also what the HTTP server writes itself.
_HOP_BACK = (_HOP - {b"content-length"}) | {b"date"}
#: The statuses that end a request.
_STATUSES = 200, 599
_KEYS = (b"authorization", b"x-api-key")
#: Seconds that a connection may idle: less than those after which servers close it (uvicorn's default is 5).
_IDLE_SECONDS = 4.0
#: Most bytes of an answer that is read as a whole.
_WHOLE_BYTES = 16 << 20


class UnreachableError(Exception):
    """No connection to the server could be made, so that it has got nothing."""


class LostError(Exception):
    """The connection broke, or the answer was no HTTP. What the server has done until then is unknown."""


class Upstream:
    """The pool. With `key`, servers get this one instead of the clients' keys."""

    def __init__(self, key: str | None = None, connect_seconds: float = 5.0) -> None:
        import aiohttp
        from yarl import URL

        self._key = None if key is None else f"Bearer {key}"
        self._url = URL
        self._unreachable = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
        self._lost = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=watched_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def send(
        self,
        url: str,
        method: str,
        headers: Mapping[str, str] | list[tuple[str, str]],
        body: bytes | AsyncIterable[bytes] | None = None,
        seconds: float | None = None,
    ) -> Answer:
        """Sends a request, and returns its answer once that has begun; raises `UnreachableError` or `LostError`."""
        data: Any = body or None
        if isinstance(body, bytes) and len(body) > 1 << 16:
            data = io.BytesIO(body)  # which is sent in pieces
        try:
            async with asyncio.timeout(seconds):
                response = await self._session.request(
                    method, self._url(url, encoded=True), headers=headers, data=data, allow_redirects=False
                )
        except self._unreachable as error:
            raise UnreachableError(_reason(error)) from None
        except self._lost as error:
            raise LostError(_reason(error)) from None
        if not _STATUSES[0] <= response.status <= _STATUSES[1]:
            response.close()
            raise LostError(f"it answered with the status {response.status}")
        return Answer(response, self._lost)

    def headers(self, given: Headers, more: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
        """The headers of a client's request as they go on; raises `ValueError` for one that is no UTF-8."""
        given = list(given)
        drop = _dropped(given, _HOP)
        if self._key is not None:
            drop = drop.union(_KEYS)
        kept = [(name.decode("ascii"), value.decode()) for name, value in given if name not in drop]
        return kept + list(self.own(more))

    def own(self, more: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
        """The headers that the front itself adds to requests."""
        found = [] if self._key is None else [("authorization", self._key)]
        return found if more is None else [*found, *more.items()]

    async def close(self) -> None:
        """Ends all connections."""
        await self._session.close()


def watched_socket(address: Any) -> socket.socket:
    """A socket that ends some 20 seconds after its peer's machine has gone: answers may be silent for long, not links.

    `address` is one that `getaddrinfo` gives.
    """
    made = socket.socket(*address[:3])
    made.setblocking(False)
    end_when_lost(made)
    return made


class Answer:
    """An answer that has begun. `close` must be called; it ends the connection where the answer is not complete."""

    def __init__(self, response: ClientResponse, lost: tuple[type[Exception], ...]) -> None:
        self._response = response
        self._lost = lost
        self.status: int = response.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that go on to the client."""
        raw = [(name.lower(), value) for name, value in self._response.raw_headers]
        drop = _dropped(raw, _HOP_BACK)
        if self.status in (204, 304):  # which have no body, whatever their heads say
            drop = drop.union((b"content-length",))
        return [header for header in raw if header[0] not in drop]

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self.header("Content-Type").startswith("text/event-stream")

    @property
    def takes_events(self) -> bool:
        """Whether it is a stream of events to which further ones can be added."""
        return self.is_stream and not (self.header("Content-Length") or self.header("Content-Encoding"))

    def header(self, name: str) -> str:
        """The value of a header; "" where there is none."""
        found: str = self._response.headers.get(name, "")
        return found

    async def piece(self) -> bytes:
        """What has arrived of the body, at once; b"" at its end. Raises `LostError` when it breaks off."""
        try:
            found: bytes = await self._response.content.readany()
        except self._lost as error:
            raise LostError(_reason(error)) from None
        return found

    async def whole(self, most: int = _WHOLE_BYTES) -> bytes:
        """The body, for answers that the front itself reads; raises `LostError`, also where it is too long."""
        pieces, size = [], 0
        while piece := await self.piece():
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise LostError(f"the answer has more than {most} bytes")
        return b"".join(pieces)

    def close(self) -> None:
        """Gives the connection back to the pool, or ends it, which tells the server that nobody waits any more."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


def _dropped(headers: list[tuple[bytes, bytes]], hop: frozenset[bytes]) -> frozenset[bytes]:
    """The names that do not go on: those of `hop`, and those that the header Connection names."""
    named = [value for name, value in headers if name == b"connection"]
    if not named or named == [b"keep-alive"]:
        return hop
    return hop.union(word.strip().lower() for value in named for word in value.split(b","))


def _reason(error: BaseException) -> str:
    """What went wrong, in words without the address."""
    from aiohttp import ClientPayloadError

    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(error, ClientPayloadError):  # whose own words are those of its parser
        return "the answer ended before it was whole, or was no HTTP"
    number = getattr(cause, "errno", None)
    if isinstance(cause, ssl.SSLError):
        text = f"TLS failed: {getattr(cause, 'verify_message', None) or cause.reason or cause}"
    elif isinstance(number, int) and number > 0:
        text = os.strerror(number)
    else:
        text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(text.split())[:200]
