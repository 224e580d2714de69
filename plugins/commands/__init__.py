"""The default subcommands of `frame`."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_commands() -> list[Provider]:
    """Offers nothing yet."""
    return []
