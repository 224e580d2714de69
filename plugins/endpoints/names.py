"""The ids of responses."""

from __future__ import annotations

import re
import uuid

from fastapi import Request

_NAME = re.compile(r"[\x21-\x7e]{1,128}")


def response_name(prefix: str, request: Request, given: str | None) -> str:
    """`prefix-` and the id that the body or the header X-Request-Id gives, else a random one."""
    wanted = given or request.headers.get("x-request-id", "")
    return f"{prefix}-{wanted if _NAME.fullmatch(wanted) else uuid.uuid4().hex}"
