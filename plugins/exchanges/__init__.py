"""Expert exchanges that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_expert_exchanges() -> list[Provider]:
    """What moves tokens between data ranks that share experts."""
    return [
        Provider(
            name="gather",
            target="frame.plugins.exchanges.gather:GatherExchange",
            api=_API,
            summary="Gives every rank all tokens, and each data rank the sums of its own; captured in graphs.",
            preference=20,
        ),
        Provider(
            name="all-to-all",
            target="frame.plugins.exchanges.all_to_all:AllToAllExchange",
            api=_API,
            summary="Sends a token only to ranks that hold its experts, with the collectives of any platform.",
            preference=10,
        ),
    ]
