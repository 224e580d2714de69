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
        Provider(
            name="sticky",
            target="frame.plugins.balancers.sticky:StickyBalancer",
            api=_API,
            summary="Keeps replicas where they are unless a move saves more time than its copy takes.",
            options="frame.plugins.balancers.sticky_options:StickyOptions",
        ),
    ]
