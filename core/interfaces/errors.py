"""How HTTP errors look: one class for each family of APIs. The default is OpenAI's, which most clients read.

Knows no route and no server; the HTTP host asks the endpoint that a request was for.
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


class RequestError(Exception):
    """Ends a request with an HTTP status and one sentence; `param` names the field at fault, `code` is for programs.

    `retry_after` is for clients that may try again, in seconds.
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
    """What clients read under every status from 400 on: `{"error": {"message", "type", "param", "code"}}`.

    Messages arrive as one bounded line. An API family of another shape overrides `body`, and `event` where its streams
    name their events.
    """

    def body(self, error: RequestError) -> dict[str, Any]:
        """The body, as an object that encodes to JSON."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "internal_server_error")
        code = error.code if error.code is not None else error.status
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}

    def event(self, error: RequestError) -> bytes:
        """The last event of a stream that fails after status 200 went out."""
        return b"data: " + msgspec.json.encode(self.body(error)) + b"\n\n"
