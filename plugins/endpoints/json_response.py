"""JSON responses, encoded by msgspec."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi.responses import Response


def json_response(value: Any) -> Response:
    """A struct or plain data as a response."""
    return Response(msgspec.json.encode(value), media_type="application/json")
