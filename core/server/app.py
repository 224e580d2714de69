"""The HTTP application: the routes of all endpoint plugins behind the one ingress, with one shape of error.

Knows no route itself.
"""

from __future__ import annotations

import http
from collections.abc import Sequence
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ..config.tree import FrameConfig
from ..interfaces.endpoint import Endpoint, RequestError
from .errors import error_body
from .ingress import Ingress
from .serving import ServingHost
from .streams import ClientGoneError

#: What a proxy calls a request whose client left; nobody reads it.
_CLIENT_GONE = 499


def _reply(status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    headers = {"retry-after": "2"} if status == 503 else None
    return Response(error_body(status, message, param, code), status, headers, media_type="application/json")


async def _on_request_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestError):
        raise error
    return _reply(error.status, error.message, error.param, error.code)


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return _reply(404, f"no route {request.url.path[:200]!r}")
    if status == 405:
        return _reply(405, f"method {request.method[:20]} is not allowed on {request.url.path[:200]!r}")
    return _reply(status, http.HTTPStatus(status).phrase)


async def _on_invalid(_: Request, error: Exception) -> Response:
    where = error.errors()[0]["loc"] if isinstance(error, RequestValidationError) else ()
    name = str(where[-1]) if where else None
    return _reply(400, f"{name or 'the request'} is missing or wrong", name)


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _on_failure(_: Request, __: Exception) -> Response:
    return _reply(500, "internal error")  # the exception goes on to the log


def build_routes(endpoints: Sequence[Endpoint], root_path: str = "") -> FastAPI:
    """The application without its ingress."""
    app = FastAPI(title="frame", version=version("frame-llm"), docs_url=None, redoc_url=None, root_path=root_path)
    for kind, handler in (
        (RequestError, _on_request_error),
        (HTTPException, _on_http_error),
        (RequestValidationError, _on_invalid),
        (ClientGoneError, _on_client_gone),
        (Exception, _on_failure),
    ):
        app.add_exception_handler(kind, handler)
    for endpoint in endpoints:
        app.include_router(endpoint.router())
    return app


def build_app(config: FrameConfig, serving: ServingHost, endpoints: Sequence[Endpoint]) -> tuple[ASGIApp, Ingress]:
    """The whole application, and its ingress (which counts what is being served)."""
    server = config.server
    routes = build_routes(endpoints, server.root_path)
    ingress = Ingress(
        routes,
        keys=server.api_key,
        max_body_bytes=server.max_body_bytes,
        problem=lambda: serving.error,
        root_path=server.root_path,
        request_ids=server.enable_request_id_headers,
    )
    if not server.allowed_origins:
        return ingress, ingress
    return (
        CORSMiddleware(ingress, allow_origins=server.allowed_origins, allow_methods=["*"], allow_headers=["*"]),
        ingress,
    )
