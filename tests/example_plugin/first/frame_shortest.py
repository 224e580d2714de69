"""A scheduling policy: the request with the least left to compute goes first."""

from frame import Provider, hookimpl
from frame.interfaces import SchedulerPolicy


@hookimpl
def frame_schedulers():
    return [
        Provider("shortest", "frame_shortest:ShortestFirst", api=">=0.2.dev1,<0.3", summary="shortest request first")
    ]


class ShortestFirst(SchedulerPolicy):
    def key(self, request):
        return (request.num_tokens - request.num_computed, request.arrival)
