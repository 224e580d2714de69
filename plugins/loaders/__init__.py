"""The default weight loaders."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_weight_loaders() -> list[Provider]:
    """Offers nothing yet."""
    return []
