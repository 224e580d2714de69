"""The message of the peer connector's scheduler side. Knows no socket."""

from __future__ import annotations

import msgspec

from ..blocks.messages import BlockStep


class PeerStep(BlockStep, kw_only=True, omit_defaults=True):
    """`sources[owner]` is the index of the peer from which that request's blocks are loaded."""

    sources: dict[str, int] = msgspec.field(default_factory=dict)
