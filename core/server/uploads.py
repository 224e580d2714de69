"""Uploads of files: the only bodies that are not JSON, on routes that ask for them, bounded while they are read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.types import Message, Receive, Scope

from ..interfaces.errors import RequestError

_MULTIPART = b"multipart/form-data"


class Uploads:
    """Which paths accept files, up to which size, and from pages of which origins."""

    def __init__(self, paths: Collection[str] = (), max_bytes: int = 0, origins: Sequence[str] = ()) -> None:
        self._paths = frozenset(paths)
        self._max_bytes = max_bytes
        self._origins = {origin.encode() for origin in origins}

    def admit(self, scope: Scope, path: str | None, receive: Receive) -> Receive | None:
        """A `receive` that bounds the body; None for a request that is no upload. Raises `RequestError`.

        Browsers send forms to other origins without a preflight request, so the page's origin must be allowed.
        """
        headers: dict[bytes, bytes] = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if path not in self._paths or scope["method"] != "POST" or kind != _MULTIPART:
            return None
        origin = headers.get(b"origin")
        if origin is not None and b"*" not in self._origins and origin not in self._origins:
            raise RequestError(403, "pages of this origin may not send files (--allowed-origins)")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 19 or int(length) > self._max_bytes):
            raise self._too_long()
        return self._bounded(receive)

    def _bounded(self, receive: Receive) -> Receive:
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                raise self._too_long()
            return message

        return bounded

    def _too_long(self) -> RequestError:
        return RequestError(413, f"the upload exceeds {self._max_bytes} bytes (--max-upload-bytes)")
