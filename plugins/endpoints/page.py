"""`GET /`: a page to talk to the model and to watch the engine. Static files, the same for every user.

The page calls the API with the key that its user types; the files themselves need no key. The page loads nothing from
other hosts, and its content security policy forbids it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from frame.interfaces import Endpoint, EndpointSetup

_FOLDER = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class PageEndpoint(Endpoint):
    """The page and its parts under `/page/`; without routes under `--no-page`."""

    def __init__(self, setup: EndpointSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        files = sorted(_FOLDER.iterdir()) if self.settings.page else []
        self._files = {_path(file): _File(file) for file in files if file.suffix in _TYPES}
        self.public_paths = tuple(self._files)

    def router(self) -> APIRouter:
        """One route a file."""
        router = APIRouter()
        for path, file in self._files.items():
            router.add_api_route(path, file.answer, methods=["GET"], include_in_schema=False)
        return router


def _path(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.name}"


class _File:
    """A file with its headers; answers 304 to a browser that has it."""

    def __init__(self, file: Path) -> None:
        self._body = file.read_bytes()
        etag = f'"{hashlib.sha256(self._body).hexdigest()[:20]}"'
        self._headers = {**_HEADERS, "content-type": f"{_TYPES[file.suffix]}; charset=utf-8", "etag": etag}

    async def answer(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)
