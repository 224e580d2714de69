"""The page of a front: static files that show what `/fleet` says. They need no key; what they ask for does."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.types import Scope, Send

_FOLDER = Path(__file__).with_name("static")
_TYPES = {".html": b"text/html", ".css": b"text/css", ".js": b"text/javascript"}
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        b"form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class PageFile:
    """A file with its headers; answers 304 to a browser that has it."""

    def __init__(self, file: Path) -> None:
        self._body = file.read_bytes()
        self._etag = b'"%b"' % hashlib.sha256(self._body).hexdigest()[:20].encode()
        kind = (b"content-type", _TYPES[file.suffix] + b"; charset=utf-8")
        self._headers = [*_HEADERS, kind, (b"etag", self._etag)]

    async def answer(self, scope: Scope, send: Send) -> None:
        """Serves GET and HEAD."""
        known = any(name == b"if-none-match" and value == self._etag for name, value in scope["headers"])
        body = b"" if known else self._body
        length = [] if known else [(b"content-length", b"%d" % len(body))]
        headers = [*self._headers, *length]
        await send({"type": "http.response.start", "status": 304 if known else 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def page_files() -> dict[str, PageFile]:
    """The files by their paths."""
    return {_path(file): PageFile(file) for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}


def _path(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/fleet/{file.name}"
