"""The default scheduling policies."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_schedulers() -> list[Provider]:
    """Offers nothing yet."""
    return []
