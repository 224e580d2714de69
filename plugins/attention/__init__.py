"""The default attention backends."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_attention_backends() -> list[Provider]:
    """Offers nothing yet."""
    return []
