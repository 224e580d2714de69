"""Reads the bodies of clients, bounded in bytes and time. They are kept, so that another server can get them again.

Files that clients send are passed on piece by piece instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.types import Message, Receive, Scope

from frame.core.interfaces.errors import RequestError
from frame.core.server.bodies import BODY_SECONDS, PIECE_SECONDS

#: Bytes beyond the bound that are read and dropped, so that the client of too long a body reads the error.
_DROPPED_BYTES = 16 << 20


class ClientLeftError(Exception):
    """The client has disconnected, so that nobody reads an answer."""


def announced(scope: Scope) -> int | None:
    """The length that the head names; None where it names none."""
    lengths = (value for name, value in scope["headers"] if name == b"content-length" and value.isdigit())
    return next((int(value.lstrip(b"0")[:20] or b"0") for value in lengths), None)


def is_upload(scope: Scope) -> bool:
    """Whether the body is a form with files."""
    kinds = (value for name, value in scope["headers"] if name == b"content-type")
    return any(kind.lstrip().lower().startswith(b"multipart/form-data") for kind in kinds)


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The whole body; raises `RequestError` 413 above `most` bytes, 408 when it does not come, `ClientLeftError`."""
    length = announced(scope) or 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            message = await receive()  # most bodies come in one piece
            body, more = _piece(message)
            if not more and max(length, len(body)) <= most:
                return body
            pieces, size = [body], len(body)
            # most clients read no answer before they have sent everything, so the rest is read and dropped
            while more and max(length, size) <= most + _DROPPED_BYTES:
                body, more = _piece(await receive())
                size += len(body)
                if max(length, size) <= most:
                    pieces.append(body)
                else:
                    pieces.clear()
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
    if max(length, size) > most:
        raise RequestError(413, f"the body exceeds {most} bytes (--max-body-bytes)")
    return b"".join(pieces)


class Upload:
    """The pieces of a body of at most `most` bytes, while they arrive. `error` is why they ended early, if they did.

    `ended` is called once all of them have been read. `check` sees each, and raises `RequestError` to refuse the body.
    """

    def __init__(
        self,
        receive: Receive,
        most: int,
        ended: Callable[[], None],
        check: Callable[[bytes], None] | None = None,
    ) -> None:
        self._receive = receive
        self._most = most
        self._ended = ended
        self._check = check
        self.error: RequestError | ClientLeftError | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Each piece that is not empty; raises `error`, which the client that sends the pieces on may hide."""
        size, more = 0, True
        while more:
            try:
                async with asyncio.timeout(PIECE_SECONDS):
                    piece, more = _piece(await self._receive())
                size += len(piece)
                if size > self._most:
                    await drop(self._receive)
                    raise too_long(self._most)
                if self._check is not None:
                    self._check(piece)
            except TimeoutError:
                self.error = RequestError(408, f"no piece of the body arrived for {PIECE_SECONDS:g} seconds")
            except (RequestError, ClientLeftError) as error:
                self.error = error
            if self.error is not None:
                raise self.error
            if piece:
                yield piece
        self._ended()


async def drop(receive: Receive) -> None:
    """Reads what a client still sends, within a bound: most clients read no answer before they have sent everything."""
    left, more = _DROPPED_BYTES, True
    with contextlib.suppress(TimeoutError, ClientLeftError):
        async with asyncio.timeout(PIECE_SECONDS):
            while more and left > 0:
                piece, more = _piece(await receive())
                left -= len(piece)


def too_long(most: int) -> RequestError:
    """The refusal of files."""
    return RequestError(413, f"the upload exceeds {most} bytes (--max-upload-bytes)")


def _piece(message: Message) -> tuple[bytes, bool]:
    if message["type"] == "http.disconnect":
        raise ClientLeftError
    return message.get("body", b""), message.get("more_body", False)
