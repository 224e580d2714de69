"""Errors of requests: what the text side and pydantic refuse becomes a 400 that names the field.

Each endpoint gives the format of error bodies of its routes. No error shows the repr of an object.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Container, Iterable, Iterator

import msgspec
from pydantic import ValidationError
from starlette.types import Scope

from frame.findings import predicate
from frame.quoting import shortened

from ..interfaces.errors import ErrorShape, RequestError
from ..interfaces.sampling import SamplingParams

logger = logging.getLogger("frame.server")

_MAX_MESSAGE = 2000
_DEFAULT = ErrorShape()
#: The scope key under which the ingress stores the error format of a request.
ERROR_SHAPE = "frame.errors"
#: Most names of ignored request fields that are logged.
_MAX_IGNORED_NAMES = 64
#: The names of union branches in the location of a pydantic error.
_BRANCHES = ("str", "int", "float", "bool", "list", "dict")


class ErrorShapes:
    """The error formats of all routes and of the paths below them.

    `routes` holds the path of each route, its expression, and the format of its endpoint.
    """

    def __init__(self, routes: Iterable[tuple[str, re.Pattern[str], ErrorShape]]) -> None:
        own = [route for route in routes if type(route[2]) is not ErrorShape]
        below = [(re.compile(re.escape(path.rstrip("/")) + "/"), shape) for path, _, shape in own]
        self._routes = [*((pattern, shape) for _, pattern, shape in own), *below]

    def of(self, path: str) -> ErrorShape:
        """The shape for a path; the default one where no route is."""
        return next((shape for pattern, shape in self._routes if pattern.match(path)), _DEFAULT)


def _plain(error: RequestError) -> RequestError:
    """A copy of the error whose message is one line of bounded length."""
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


class IgnoredFields:
    """Logs each name of a request field that nothing reads, once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __call__(self, name: str) -> None:
        """Logs a name; since clients can invent names without end, there is a bound."""
        if name in self._names or len(self._names) >= _MAX_IGNORED_NAMES:
            return
        self._names.add(name)
        logger.warning("requests carry the field %.80r, which is ignored (--strict-fields refuses it)", name)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns errors of the front about a request into a 400."""
    try:
        yield
    except ValueError as error:
        raise refusal(error) from None


def refusal(error: ValueError) -> RequestError:
    """A 400 that names the field: the error's own, else the first word of its message."""
    param = getattr(error, "param", None) or _subject(str(error), SamplingParams.__struct_fields__)
    return RequestError(400, str(error), param=param)


def _subject(text: str, fields: Container[str]) -> str | None:
    """The first word of a sentence about a field, if it is one of `fields`."""
    first = re.match(r"\w+", text)
    return first.group() if first is not None and first.group() in fields else None


def field_error(error: ValidationError, fields: Container[str]) -> RequestError:
    """The first error that pydantic found, in the union branch that came closest, as one sentence about the field."""
    errors = error.errors(include_url=False, include_context=False)
    field = errors[0]["loc"][:1]
    # of a value that is of no branch's type, each branch says so; the one whose type it has says what is wrong with it
    first = max(
        (each for each in errors if each["loc"][:1] == field),
        key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")),
    )
    names = [str(part) for part in first["loc"] if not _is_branch(part)]
    where = ".".join(map(shortened, names))
    text = predicate(first)
    return RequestError(400, f"{where} {text}".strip(), param=names[0] if names else _subject(text, fields))


def _is_branch(part: int | str) -> bool:
    """Whether a part of an error's location names a branch of a union rather than a field."""
    return isinstance(part, str) and ("[" in part or part.removeprefix("constrained-") in _BRANCHES)
