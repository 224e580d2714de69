"""The formats of quantised weights that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_quantizations() -> list[Provider]:
    """What weights may be stored as, or become while they load."""
    return []
