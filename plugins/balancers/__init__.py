"""Balancers of experts that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_expert_balancers() -> list[Provider]:
    """The policies by which experts are spread over ranks."""
    return [
        Provider(
            name="hierarchical",
            target="frame.plugins.balancers.hierarchical:HierarchicalBalancer",
            api=_API,
            summary="Spreads groups over nodes, replicates hot experts, packs ranks evenly; ignores what a move costs.",
            preference=10,
        ),
    ]
