"""Route policies that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_route_policies() -> list[Provider]:
    """How `frame route` chooses among servers."""
    return [
        Provider(
            name="least-load",
            target="frame.plugins.routing.least_load:LeastLoadPolicy",
            api=_API,
            summary="The server with the fewest requests under way; equal ones take turns.",
            preference=10,
        ),
        Provider(
            name="round-robin",
            target="frame.plugins.routing.round_robin:RoundRobinPolicy",
            api=_API,
            summary="Servers take turns.",
        ),
        Provider(
            name="pairs",
            target="frame.plugins.routing.pairs:PairsPolicy",
            api=_API,
            summary="Like least-load, but short requests are not divided into prefill and decode.",
            options="frame.plugins.routing.pairs_options:PairsOptions",
        ),
        Provider(
            name="text-prefix",
            target="frame.plugins.routing.text_prefix:TextPrefixPolicy",
            api=_API,
            summary="The server that got the longest beginning of the prompt before, weighed against load.",
            options="frame.plugins.routing.text_prefix_options:TextPrefixOptions",
        ),
        Provider(
            name="prefix",
            target="frame.plugins.routing.prefix:PrefixPolicy",
            api=_API,
            summary="The server that has the longest beginning of the prompt cached, as KV events tell, against load.",
            options="frame.plugins.routing.prefix_options:PrefixOptions",
        ),
    ]
