"""ASGI middleware that the operator names by its import path. Below the ingress, so that it opens no route to anybody.

Knows no route.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config.errors import ConfigError
from .wire import WIRE


class MessagesOnly:
    """Has every frame of a stream pass as a message, which middleware sees and may hold back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        scope.pop(WIRE, None)
        await self._app(scope, receive, send)


def add_middleware(app: Starlette, paths: Sequence[str]) -> None:
    """Puts what `paths` name around `app`, the last one outermost; raises `ConfigError`.

    A class is built as `Class(app)`; a coroutine function is called as `function(request, call_next)`.
    """
    for path in paths:
        found: Any = _load(path)
        if inspect.isclass(found):
            kind: Any = found  # built with the application alone
            app.add_middleware(kind)
        elif inspect.iscoroutinefunction(found):
            app.add_middleware(BaseHTTPMiddleware, dispatch=found)
        else:
            raise ConfigError(f"middleware {path!r} is neither a class nor a coroutine function")
    if paths:
        app.add_middleware(MessagesOnly)


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"middleware {path!r} cannot be imported: {error} (--middleware package.module.name)"
        ) from None
