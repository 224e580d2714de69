"""Responses kept in memory for a while: for their owner only, within bounds of number, bytes and time.

Each API process has its own. Knows no format of a response but its id and status.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from frame.interfaces import RequestError
from frame.quoting import quoted

Object = dict[str, Any]

_RUNNING = ("queued", "in_progress")


class StoredResponse:
    """One response and its input. `history` are the items of the whole conversation before its output."""

    def __init__(self, owner: str, response: Object, input_items: list[Object], history: list[Object]) -> None:
        self.owner = owner
        self.response = response
        self.input_items = input_items
        self.history = history
        self.expires = 0.0
        self.num_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self._frames: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def running(self) -> bool:
        """Whether it is still being generated."""
        return self.response["status"] in _RUNNING

    @property
    def recorded(self) -> bool:
        """Whether its events were recorded."""
        return bool(self._frames) or self.running

    def record(self, frame: bytes) -> None:
        """Records an event for clients that follow; its sequence number is its index."""
        self._frames.append(frame)
        self.notify()

    @property
    def key(self) -> tuple[str, str]:
        """Owner and id: the key in the store."""
        return self.owner, self.response["id"]

    def notify(self) -> None:
        """Wakes the clients that follow."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Recorded events from number `start` on, then new ones as they are recorded."""
        while True:
            while start < len(self._frames):
                yield self._frames[start]
                start += 1
            if not self.running:
                return
            await self._changed.wait()

    def measure(self) -> int:
        """About how many bytes it takes, without the history that it shares with other responses."""
        return len(msgspec.json.encode([self.response, self.input_items])) + sum(map(len, self._frames))


class ResponseStore:
    """All stored responses. Over the bounds, the oldest of the owner with most bytes is dropped.

    `clock` is in seconds.
    """

    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        max_running: int,
        ttl_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_running = max_running
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        # by owner and id: clients may choose ids, and must not find responses of other owners
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, stored: StoredResponse) -> None:
        """Stores a response; it replaces the owner's earlier one of that id.

        Raises `RequestError` 429 when too many are being generated in the background.
        """
        running = sum(each.running and each.response["background"] for each in self._stored.values())
        if stored.response["background"] and running >= self._max_running:
            raise RequestError(429, f"{running} responses are being generated in the background; wait for one of them")
        stored.expires = self._clock() + self._ttl_seconds
        self.drop(stored)
        self._stored[stored.key] = stored
        self.settle(stored)

    def settle(self, stored: StoredResponse) -> None:
        """Counts the bytes of a response again, and drops what is over the bounds."""
        if self._stored.get(stored.key) is stored:
            self.num_bytes -= stored.num_bytes
            stored.num_bytes = stored.measure()
            self.num_bytes += stored.num_bytes
        self._shrink()

    def get(self, name: str, owner: str) -> StoredResponse:
        """The response with an id; raises `RequestError` 404 also when it belongs to somebody else."""
        self._shrink()
        stored = self._stored.get((owner, name))
        if stored is None:
            raise RequestError(404, f"no response {quoted(name)} is stored", code="response_not_found")
        return stored

    def drop(self, stored: StoredResponse) -> None:
        """Removes the response that is stored under this one's key, and cancels it if it is running."""
        found = self._stored.pop(stored.key, None)
        if found is not None:
            self.num_bytes -= found.num_bytes
            if found.task is not None:
                found.task.cancel()

    def _shrink(self) -> None:
        now = self._clock()
        for stored in list(self._stored.values()):
            if stored.expires > now:
                break
            if not stored.running:
                self.drop(stored)
        while self._over and (oldest := self._next_to_drop()) is not None:
            self.drop(oldest)

    @property
    def _over(self) -> bool:
        return len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes

    def _next_to_drop(self) -> StoredResponse | None:
        """The oldest response of the owner with most bytes, so that no owner displaces the others' responses."""
        taken: Counter[str] = Counter()
        many = len(self._stored) > self._max_responses
        ended = [stored for stored in self._stored.values() if not stored.running]
        for stored in ended:
            taken[stored.owner] += 1 if many else stored.num_bytes
        most = max(taken.values(), default=0)
        return next((stored for stored in ended if taken[stored.owner] == most), None)
