"""ASGI middleware that the operator names by its import path.

It runs after the ingress, so that it cannot give access without a key. It sees the requests that the ingress admits,
also those that need no key, and calls from inside the process (lines of batches), which have neither the client's
headers nor its address. Admin routes have no middleware.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from frame.quoting import quoted

from ..config.errors import ConfigError
from .event_stream import WIRE


def add_middleware(app: Starlette, paths: Sequence[str]) -> None:
    """Wraps `app` in the middleware named by `paths`, the last one outermost, and builds it; raises `ConfigError`.

    A class is built as `Class(app)`; a coroutine function is called as `function(request, call_next)`. Nothing can be
    added to `app` afterwards.
    """
    for path in paths:
        found: Any = _load(path)
        if inspect.isclass(found):
            app.add_middleware(partial(_build, path, found))
        elif inspect.iscoroutinefunction(found):
            if not _takes(found, 2):
                raise ConfigError(f"middleware {quoted(path)} cannot be called as function(request, call_next)")
            app.add_middleware(BaseHTTPMiddleware, dispatch=found)
        else:
            raise ConfigError(f"middleware {quoted(path)} is neither a class nor a coroutine function")
    if paths:
        app.add_middleware(_as_messages)
        # built here, so that an error ends the start instead of every request
        app.middleware_stack = app.build_middleware_stack()


def _as_messages(app: ASGIApp) -> ASGIApp:
    """Sends every frame of a stream as an ASGI message, so that middleware sees it and may delay it."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        scope.pop(WIRE, None)
        await app(scope, receive, send)

    return serve


def _build(path: str, kind: type, app: ASGIApp) -> ASGIApp:
    try:
        built: Any = kind(app)
    except Exception as error:
        raise ConfigError(f"middleware {quoted(path)} cannot be built as Class(app): {error}") from error
    if not callable(built) or not _takes(built, 3):
        raise ConfigError(
            f"middleware {quoted(path)} is no ASGI application: its objects are not called as (scope, receive, send)"
        )
    dispatch = getattr(built, "dispatch_func", None)
    if isinstance(built, BaseHTTPMiddleware) and getattr(dispatch, "__func__", None) is BaseHTTPMiddleware.dispatch:
        raise ConfigError(f"middleware {quoted(path)} has no dispatch of its own")
    application: ASGIApp = built
    return application


def _takes(function: Any, number: int) -> bool:
    """Whether it can be called with so many arguments by position."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # its signature is unknown
        pass
    return True


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # the module may raise anything while it is imported
        raise ConfigError(
            f"middleware {quoted(path)} cannot be imported: {error} (--middleware package.module.name)"
        ) from None
