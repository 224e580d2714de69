"""The HTTP application: the routes of all endpoint plugins behind one ingress. Turns exceptions into error answers."""

from __future__ import annotations

import http
import json
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from frame.quoting import quoted
from frame.served.adapters import AdapterNames

from ..config.tree import FrameConfig
from ..interfaces.endpoint import Endpoint
from ..interfaces.errors import RequestError
from ..interfaces.provider import Provider
from ..interfaces.setup import EndpointSetup
from ..plugin_host.isolation import is_configured, run_or_leave_out
from ..plugin_host.registry import Registry
from ..plugin_host.setups import endpoint_setup
from .calls import RouteCalls
from .deadlines import Deadlines
from .errors import ErrorShapes, error_body, retry_headers
from .event_stream import ClientGoneError
from .ingress import Ingress
from .keys import KeyLimits
from .middleware import add_middleware
from .serving import ServingHost

#: The status that proxies log for a request whose client disconnected; nobody reads it.
_CLIENT_GONE = 499


async def _answer_error(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with an exception, in the form of its route."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=_CLIENT_GONE)
    answer = RequestError(500, "internal error")  # the exception is raised again and logged
    if isinstance(error, RequestError):
        answer = error
    elif isinstance(error, RequestValidationError):
        where = error.errors()[0]["loc"]
        name = str(where[-1]) if where else None
        answer = RequestError(400, f"{name or 'the request'} is missing or wrong", param=name)
    elif isinstance(error, HTTPException):
        text = http.HTTPStatus(error.status_code).phrase
        if error.status_code == 404:
            path = f"/v1{request.scope['path']}"  # a base URL is often given without its end
            there = any(route.matches({**request.scope, "path": path})[0] is Match.FULL for route in request.app.routes)
            text = f"no route {quoted(request.url.path)}{f'; there is {quoted(path)}' if there else ''}"
        elif error.status_code == 405:
            text = f"method {request.method[:20]} is not allowed on {quoted(request.url.path)}"
        answer = RequestError(error.status_code, text)
    body, headers = error_body(request.scope, answer), retry_headers(answer)
    return Response(body, answer.status, headers, media_type="application/json")


def build_routes(routers: Sequence[APIRouter], root_path: str = "", *, openapi: bool = True) -> FastAPI:
    """The application without its ingress."""
    app = FastAPI(
        title="frame",
        version=version("frame-llm"),
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if openapi else None,
        root_path=root_path,
    )
    for kind in (RequestError, HTTPException, RequestValidationError, ClientGoneError, Exception):
        app.add_exception_handler(kind, _answer_error)
    for router in routers:
        app.include_router(router)
    describe = app.openapi
    app.openapi = cache(lambda: _with_shared_definitions(describe()))  # type: ignore[method-assign]
    return app


def _with_shared_definitions(document: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with the definitions inside bodies moved to where references point, under unique names."""
    shared = document.setdefault("components", {}).setdefault("schemas", {})
    for operation in [each for path in document.get("paths", {}).values() for each in path.values()]:
        for media in operation.get("requestBody", {}).get("content", {}).values():
            title = media["schema"].get("title", "Body")
            text = json.dumps(media["schema"]).replace('"$ref": "#/$defs/', f'"$ref": "#/components/schemas/{title}.')
            media["schema"] = schema = json.loads(text)
            shared.update({f"{title}.{name}": value for name, value in schema.pop("$defs", {}).items()})
    return document


def _shapes(endpoints: Sequence[Endpoint], routers: Sequence[APIRouter]) -> ErrorShapes:
    """The shape of each route's errors."""
    return ErrorShapes(
        (route.path, route.path_regex, endpoint.errors)
        for endpoint, router in zip(endpoints, routers, strict=True)
        for route in router.routes
        if isinstance(route, Route)
    )


def make_endpoints(config: FrameConfig, registry: Registry, serving: ServingHost) -> list[Endpoint]:
    """The endpoints of all installed plugins for this kind of server."""
    setup = endpoint_setup(config, serving)
    made = []
    for provider in registry.providers("endpoint"):
        work = partial(_endpoint, registry, provider, setup, config)
        if endpoint := run_or_leave_out(registry, provider, work, named=is_configured(provider, config)):
            made.append(endpoint)
    mode = "tokens" if config.server.tokens_only else "text"
    return [endpoint for endpoint in made if endpoint.admin or mode in endpoint.modes]


def _endpoint(registry: Registry, provider: Provider, setup: EndpointSetup, config: FrameConfig) -> Endpoint:
    """Built, and of other packages with its routes tried: a router that fails must not end the server."""
    endpoint: Endpoint = registry.make("endpoint", provider, setup, config)
    if not provider.target.startswith("frame.plugins."):
        build_routes([endpoint.router()])
    return endpoint


def build_admin(config: FrameConfig, endpoints: Sequence[Endpoint]) -> Ingress:
    """The application of the admin listener, behind an ingress and keys of its own."""
    routers = [endpoint.router() for endpoint in endpoints]
    own = {"api_key": config.server.admin_key, "root_path": "", "max_request_seconds": None}
    server = config.server.model_copy(update=own)
    return Ingress(Deadlines(build_routes(routers)), server, lambda: None, shapes=_shapes(endpoints, routers))


def build_app(
    config: FrameConfig,
    serving: ServingHost,
    endpoints: Sequence[Endpoint],
    limits: KeyLimits | None = None,
) -> tuple[ASGIApp, Ingress]:
    """The whole application, and its ingress; `limits` bounds what each key may have under way."""
    server = config.server
    routers = [endpoint.router() for endpoint in endpoints]
    routes = build_routes(routers, server.root_path, openapi=server.openapi)
    add_middleware(routes, server.middleware)
    if config.adapters.enable_lora:
        routes.add_middleware(AdapterNames, adapters=serving.adapters)
    shapes = _shapes(endpoints, routers)

    def longest() -> int:
        return 0 if serving.models.pooling is not None else serving.limits.max_model_len

    serving.calls = RouteCalls(routes, routers, shapes, server, longest, limits)
    inner: ASGIApp = routes
    for endpoint in endpoints:
        inner = endpoint.wrap(inner)
    public_paths = [path for endpoint in endpoints for path in endpoint.public_paths]
    ingress = Ingress(
        inner,
        server,
        lambda: serving.problem,
        shapes=shapes,
        public_paths=[*public_paths, "/metrics"] if server.public_metrics else public_paths,
        uploads=[path for endpoint in endpoints for path in endpoint.uploads],
        traffic=serving.metrics,
        limits=limits,
    )
    if not server.allowed_origins:
        return ingress, ingress
    app = CORSMiddleware(
        ingress,
        allow_origins=server.allowed_origins,
        allow_methods=server.allowed_methods,
        allow_headers=server.allowed_headers,
        allow_credentials=server.allow_credentials,
    )
    return app, ingress
