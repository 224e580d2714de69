"""The queue of requests that wait for admission, in the order of a policy. Knows no blocks and no slots."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

from ...interfaces.scheduling import SchedulerPolicy
from ..request import Request


class WaitingQueue:
    """Sorted by the policy's key at the time of entry, then by arrival at this engine.

    A preempted request enters like any other: with an order by arrival it stands before all that never ran.
    """

    def __init__(self, policy: SchedulerPolicy) -> None:
        self._policy = policy
        self._entries: list[tuple[tuple[Any, ...], int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Smallest key first; over a copy, so that the loop may remove what it gets."""
        return iter([request for _, _, request in self._entries])

    def first_of_each(self, num_owners: int, may_run: Callable[[Request], bool]) -> Iterator[Request]:
        """Of each owner the first request that may run, smallest key first; `num_owners` have requests here."""
        seen: set[str] = set()
        for _, _, request in self._entries:
            if request.owner not in seen and may_run(request):
                yield request
                seen.add(request.owner)
                if len(seen) >= num_owners:
                    return

    def add(self, request: Request) -> None:
        """Files the request by the key that the policy gives it now."""
        request.queue_key = self._policy.key(request)
        insort(self._entries, (request.queue_key, request.sequence, request))

    def put_first(self, request: Request) -> None:
        """Files a waiting request before all others."""
        self.remove(request)
        request.queue_key = ()
        insort(self._entries, (request.queue_key, request.sequence, request))

    def remove(self, request: Request) -> None:
        """Takes a waiting request out; raises `ValueError` when it does not wait."""
        index = bisect_left(self._entries, (request.queue_key, request.sequence), key=lambda entry: entry[:2])
        if index == len(self._entries) or self._entries[index][2] is not request:
            raise ValueError(f"request {request.request_id!r} is not in the waiting queue")
        del self._entries[index]
