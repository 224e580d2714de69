"""The default KV connectors."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_kv_connectors() -> list[Provider]:
    """Offers nothing yet."""
    return []
