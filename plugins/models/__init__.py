"""The default models."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_models() -> list[Provider]:
    """Offers nothing yet."""
    return []
