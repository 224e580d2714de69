"""Prefill and decode on different servers, for requests that are long enough."""

from __future__ import annotations

from collections.abc import Sequence

from frame.interfaces import Route, RouteRequest, RouteServer

from .least_load import LeastLoadPolicy


class PairsPolicy(LeastLoadPolicy):
    """Divides a request when its body is long: to compute a short prompt takes less time than to fetch its KV.

    The body's bytes stand for the tokens of the prompt, which this front does not know.
    """

    def route(self, request: RouteRequest, servers: Sequence[RouteServer], prefills: Sequence[RouteServer]) -> Route:
        long = len(request.body) >= self.options.min_body_bytes
        return super().route(request, servers, prefills if long else ())
