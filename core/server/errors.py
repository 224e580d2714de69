"""The one error body of all routes: `{"error": {"message", "type", "param", "code"}}`. Never the repr of an object."""

from __future__ import annotations

import msgspec

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_MAX_MESSAGE = 2000


class ErrorDetail(msgspec.Struct):
    """`type` follows from the status; `param` names the field at fault; `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct):
    """What a client reads under every status from 400 on, and as the last event of a stream that fails."""

    error: ErrorDetail


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """The body as JSON; the message is cut to one bounded line."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    text = " ".join(message.split())[:_MAX_MESSAGE]
    return msgspec.json.encode(ErrorBody(ErrorDetail(text, kind, param, code if code is not None else status)))
