"""The errors that refuse a request, and the form in which an API family answers them. The default is OpenAI's.

Knows no route; the server asks the endpoint that a request was for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

_TYPES: Mapping[int, str] = MappingProxyType({
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
})  # fmt: skip


class InvalidRequest(ValueError):
    """A request that is refused; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestError(Exception):
    """Ends a request with an HTTP status and one sentence; `param` names the wrong field, `code` is for programs.

    `retry_after` are the seconds after which a client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after


class ErrorShape:
    """Makes the bodies of answers with a status from 400 on: `{"error": {"message", "type", "param", "code"}}`.

    The server shortens messages to one line before. An API family of another form overrides `body`, and `event` if its
    streams name their events.
    """

    def body(self, error: RequestError) -> dict[str, Any]:
        """Returns the body, as an object that encodes to JSON."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "internal_server_error")
        code = error.code if error.code is not None else error.status
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}

    def event(self, error: RequestError) -> bytes:
        """Returns the last event of a stream that fails after its status 200 was sent."""
        return b"data: " + msgspec.json.encode(self.body(error)) + b"\n\n"
