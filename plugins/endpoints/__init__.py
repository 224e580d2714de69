"""The default HTTP routes."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_endpoints() -> list[Provider]:
    """Offers nothing yet."""
    return []
