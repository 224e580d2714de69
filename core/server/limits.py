"""How many requests each API key may have under way and may send in a minute, counted over all API processes.

The counts lie in memory that the parent opened: a row for each process, so that a dead one's are forgotten when its
successor starts, and a token bucket for each key. Knows no route.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..interfaces.errors import RequestError

#: Most API processes of a server.
MAX_PROCESSES = 64
_BUCKET, _FILLED, _COUNTS = 0, 1, 2


class KeyLimits:
    """Asked by the ingress for each request that makes work. `most` and `per_minute` None: no limit."""

    def __init__(
        self,
        keys: Sequence[str],
        *,
        most: int | None = None,
        per_minute: int | None = None,
        descriptor: int | None = None,
        process: int = 0,
    ) -> None:
        self._most = most
        self._per_minute = per_minute
        self._columns = {hashlib.sha256(key.encode()).hexdigest(): index for index, key in enumerate(keys)}
        self._descriptor = os.memfd_create("frame-limits") if descriptor is None else descriptor
        shape = (_COUNTS + MAX_PROCESSES, max(1, len(keys)))
        os.ftruncate(self._descriptor, shape[0] * shape[1] * 8)
        self._cells = np.frombuffer(mmap.mmap(self._descriptor, shape[0] * shape[1] * 8), np.float64).reshape(shape)
        self._own = self._cells[_COUNTS + process]
        self._own[:] = 0

    @property
    def active(self) -> bool:
        """Whether there is any limit."""
        return self._most is not None or self._per_minute is not None

    @contextlib.contextmanager
    def admit(self, owner: str) -> Iterator[None]:
        """Counts a request of the key with this digest while it runs; raises `RequestError` 429 when it is too much."""
        if not self.active:
            yield
            return
        column = self._columns.get(owner, 0)
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            self._check_number(column)
            self._check_rate(column)
            self._own[column] += 1
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        try:
            yield
        finally:
            self._own[column] -= 1

    def _check_number(self, column: int) -> None:
        if self._most is not None and self._cells[_COUNTS:, column].sum() >= self._most:
            raise RequestError(
                429,
                f"this key has {self._most} requests under way, which is its limit (--max-requests-per-key)",
                code="concurrency_limit_exceeded",
            )

    def _check_rate(self, column: int) -> None:
        """A bucket that holds a minute's requests and fills evenly."""
        if self._per_minute is None:
            return
        now, rate = time.monotonic(), self._per_minute / 60
        bucket, filled = self._cells[_BUCKET], self._cells[_FILLED]
        level = self._per_minute if filled[column] == 0 else bucket[column] + (now - filled[column]) * rate
        bucket[column], filled[column] = min(level, self._per_minute), now
        if bucket[column] < 1:
            raise RequestError(
                429,
                f"this key may send {self._per_minute} requests in a minute (--max-requests-per-minute)",
                code="rate_limit_exceeded",
                retry_after=math.ceil((1 - bucket[column]) / rate),
            )
        bucket[column] -= 1
