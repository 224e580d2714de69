"""The default logits processors."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_logits_processors() -> list[Provider]:
    """Offers nothing yet."""
    return []
