"""The policies of tiers that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.2.dev45,<0.3"


@hookimpl
def frame_tier_policies() -> list[Provider]:
    """Which blocks of a tier go when others need room."""
    return [
        Provider(
            "lru",
            "frame.plugins.tiers.lru:LruPolicy",
            api=_API,
            summary="The blocks unused for longest go first.",
            preference=10,
        ),
        Provider(
            "arc",
            "frame.plugins.tiers.arc:ArcPolicy",
            api=_API,
            summary="Adapts how many blocks that were used once it keeps beside those that were used again.",
        ),
    ]
