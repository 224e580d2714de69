"""Errors in the form of Anthropic's API, and its events: for the servers' routes and for a front before them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from frame.core.interfaces.errors import ErrorShape, RequestError

_TYPES: Mapping[int, str] = MappingProxyType({
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
})  # fmt: skip


def event(kind: str, **fields: Any) -> bytes:
    """One server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


class AnthropicErrors(ErrorShape):
    """`{"type": "error", "error": {"type", "message"}}`."""

    def body(self, error: RequestError) -> dict[str, Any]:
        """The body."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}

    def event(self, error: RequestError) -> bytes:
        """The event `error`."""
        return event("error", error=self.body(error)["error"])
