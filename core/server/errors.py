"""The format of error bodies: each endpoint gives that of its routes. Never shows the repr of an object."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from starlette.types import Scope

from ..interfaces.errors import ErrorShape, RequestError

_MAX_MESSAGE = 2000
_DEFAULT = ErrorShape()
#: The scope key under which the ingress stores the error format of a request.
ERROR_SHAPE = "frame.errors"


class ErrorShapes:
    """The shapes of all routes, and of paths below them. `routes`: each path, its expression, its endpoint's shape."""

    def __init__(self, routes: Iterable[tuple[str, re.Pattern[str], ErrorShape]]) -> None:
        own = [route for route in routes if type(route[2]) is not ErrorShape]
        below = [(re.compile(re.escape(path.rstrip("/")) + "/"), shape) for path, _, shape in own]
        self._routes = [*((pattern, shape) for _, pattern, shape in own), *below]

    def of(self, path: str) -> ErrorShape:
        """The shape for a path; the default one where no route is."""
        return next((shape for pattern, shape in self._routes if pattern.match(path)), _DEFAULT)


def _plain(error: RequestError) -> RequestError:
    """The same error with its message on one bounded line."""
    text = " ".join(error.message.split())[:_MAX_MESSAGE].encode(errors="replace").decode()
    return RequestError(error.status, text, param=error.param, code=error.code)


def _shape(scope: Scope) -> ErrorShape:
    shape: ErrorShape = scope.get(ERROR_SHAPE, _DEFAULT)
    return shape


def error_body(scope: Scope, error: RequestError) -> bytes:
    """The body as JSON."""
    return msgspec.json.encode(_shape(scope).body(_plain(error)))


def error_event(scope: Scope, error: RequestError) -> bytes:
    """The event that ends a stream."""
    return _shape(scope).event(_plain(error))


def retry_headers(error: RequestError) -> dict[str, str]:
    """Headers that say when to retry, or not to: clients of OpenAI and Anthropic repeat 5xx unless told not to."""
    if error.status in (429, 503):
        default = 1 if error.status == 429 else 2
        return {"retry-after": str(error.retry_after if error.retry_after is not None else default)}
    return {"x-should-retry": "false"} if error.status == 504 else {}
