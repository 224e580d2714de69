"""Reads the bodies of requests, bounded in size and time: strict JSON, and files for the routes that take them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
from starlette.types import Message, Receive, Scope

from ..config.server import ServerConfig
from ..interfaces.errors import RequestError

#: Bytes beyond the limit that are read and dropped, so that the client of too long a body reads the error.
_DROPPED_BYTES = 64 << 20
#: Most seconds for a whole JSON body, and between two pieces of any body, so that slow senders hold no place.
BODY_SECONDS, PIECE_SECONDS = 600.0, 60.0
#: The scope key of the parsed JSON body.
JSON_BODY = "frame.json"
#: How deep the values of a JSON body may nest.
MAX_DEPTH = 64
#: Most arrays, objects and strings of a body together; more would block the process for too long.
MAX_PARTS = 1 << 17
#: Most commas outside strings, which is about the number of all values.
MAX_VALUES = 1 << 21
_LARGE_BYTES = 1 << 18
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Bodies:
    """Admits bodies within the limits of `server`; POST requests to the paths `uploads` may send forms with files."""

    def __init__(self, server: ServerConfig, uploads: Collection[str]) -> None:
        self._server = server
        self._uploads = frozenset(uploads)
        self._parser = BodyParser()

    async def admit(self, scope: Scope, path: str | None, receive: Receive) -> Receive | None:
        """Returns the `receive` with which the route at `path` reads the body; a JSON body is parsed into the scope.

        None where the client left while it sent it. Raises `RequestError` for a body that the route must not see.
        """
        receive = _timely(receive)
        kinds = [value.split(b";")[0].strip().lower() for name, value in scope["headers"] if name == b"content-type"]
        if path in self._uploads and scope["method"] == "POST" and kinds[-1:] == [b"multipart/form-data"]:
            return self._upload(scope, receive)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(scope, receive)
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
        if body is None:
            return None
        if body:
            # browsers may send other types than JSON across origins without a preflight request
            if not any(kind == b"application/json" or kind.endswith(b"+json") for kind in kinds):
                raise RequestError(415, "the body must be JSON: send Content-Type: application/json")
            scope[JSON_BODY] = await self._parser.parse(body)
        return _replay(body, receive)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None when the client disconnects. A body that is too long is dropped while it is read."""
        limit, announced = self._server.max_body_bytes, _announced(scope)
        chunks: list[bytes] = []
        size, more = 0, True
        # most clients read no answer before they have sent everything, so the rest is read and dropped
        while more and max(announced, size) <= limit + _DROPPED_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if max(announced, size) > limit:
                chunks.clear()
            else:
                chunks.append(chunk)
        if max(announced, size) > limit:
            raise RequestError(413, f"the body exceeds {limit} bytes (--max-body-bytes)")
        return b"".join(chunks)

    def _upload(self, scope: Scope, receive: Receive) -> Receive:
        """A `receive` that bounds the form.

        Browsers send forms to other origins without a preflight request, so the page's origin must be allowed.
        """
        limit, allowed = self._server.max_upload_bytes, self._server.allowed_origins
        origin = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"), None)
        if origin is not None and "*" not in allowed and origin not in allowed:
            raise RequestError(403, "pages of this origin may not send files (--allowed-origins)")
        if _announced(scope) > limit:
            raise _too_long(limit)
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise _too_long(limit)
            return message

        return bounded


def _too_long(limit: int) -> RequestError:
    return RequestError(413, f"the upload exceeds {limit} bytes (--max-upload-bytes)")


def _announced(scope: Scope) -> int:
    """The length in bytes that the head names, 0 when it names none."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length" and value.isdigit()]
    return max((int(value[:20]) for value in lengths), default=0)


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


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then reads from the connection, which reports a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def parse_json(body: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or infinity, within the bounds above; raises `RequestError` 400."""
    if len(body) > MAX_PARTS or _num_opening(body) > MAX_DEPTH:
        _check_structure(body)
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise RequestError(400, "the body is not UTF-8") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {str(error)[:200]}") from None


class BodyParser:
    """Parses request bodies; large ones in a thread, one at a time, so that the event loop goes on."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def parse(self, body: bytes) -> Any:
        """Like `parse_json`."""
        if len(body) < _LARGE_BYTES:
            return parse_json(body)
        async with self._turn:
            return await asyncio.to_thread(parse_json, body)


def _num_opening(body: bytes) -> int:
    """How many opening brackets a body has, those in strings included."""
    if len(body) < 1 << 12:
        return body.count(b"[") + body.count(b"{")
    # numpy takes a fifth of that time for 40 kB; "[" has all bits of "{" but this one
    return int(np.count_nonzero((np.frombuffer(body, np.uint8) | 0x20) == ord("{")))


def _check_structure(body: bytes) -> None:
    """Counts brackets and commas outside strings, in a few passes at C speed for any body."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_strings = plain.count(b'"') // 2
    if num_strings > MAX_PARTS:  # checked before the split, which would copy them
        raise _too_many_parts()
    outside = b"".join(plain.split(b'"')[::2])
    found = np.frombuffer(outside.translate(None, delete=_NO_BRACKETS), np.uint8)
    brackets = found[: 2 * MAX_PARTS]  # with more opening brackets, the depth could exceed the limit
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    if int(np.cumsum(np.where(opens, np.int8(1), np.int8(-1)), dtype=np.int32).max(initial=0)) > MAX_DEPTH:
        raise RequestError(400, f"the body nests deeper than {MAX_DEPTH} levels")
    if len(found) > len(brackets) or num_strings + int(np.count_nonzero(opens)) > MAX_PARTS:
        raise _too_many_parts()
    if outside.count(b",") > MAX_VALUES:
        raise RequestError(400, f"the body holds more than {MAX_VALUES} values")


def _too_many_parts() -> RequestError:
    return RequestError(400, f"the body holds more than {MAX_PARTS} arrays, objects and strings")
