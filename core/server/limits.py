"""Limits for each API key on running requests and outputs, and on requests and tokens a minute, over all API processes.

The counts lie in memory that the parent opened: one row a process, which is cleared when a dead process is replaced,
and token buckets for each key.
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
#: Rows of the memory: a bucket's level and when it was filled last, for requests and for tokens; then requests and
#: outputs under way, by process.
_REQUESTS, _TOKENS, _COUNTS = 0, 2, 4
_OUTPUTS = _COUNTS + MAX_PROCESSES


class KeyLimits:
    """Called by the ingress for each request that needs the engine, and by the generations. A limit of None is off."""

    def __init__(
        self,
        keys: Sequence[str],
        *,
        max_requests: int | None = None,
        requests_per_minute: int | None = None,
        max_outputs: int | None = None,
        tokens_per_minute: int | None = None,
        descriptor: int | None = None,
        process: int = 0,
    ) -> None:
        self._max_requests = max_requests
        self._requests_per_minute = requests_per_minute
        self._max_outputs = max_outputs
        self._tokens_per_minute = tokens_per_minute
        self._columns = {hashlib.sha256(key.encode()).hexdigest(): index for index, key in enumerate(keys)}
        self._descriptor = os.memfd_create("frame-limits") if descriptor is None else descriptor
        shape = (_OUTPUTS + MAX_PROCESSES, max(1, len(keys)))
        os.ftruncate(self._descriptor, shape[0] * shape[1] * 8)
        self._cells = np.frombuffer(mmap.mmap(self._descriptor, shape[0] * shape[1] * 8), np.float64).reshape(shape)
        self._own, self._own_outputs = self._cells[_COUNTS + process], self._cells[_OUTPUTS + process]
        self._own[:] = self._own_outputs[:] = 0

    @property
    def active(self) -> bool:
        """Whether there is any limit of requests or tokens."""
        return not (
            self._max_requests is None and self._requests_per_minute is None and self._tokens_per_minute is None
        )

    @contextlib.contextmanager
    def admit(self, owner: str) -> Iterator[None]:
        """Counts a request of the key with this digest while it runs; raises `RequestError` 429 above the limit."""
        if not self.active:
            yield
            return
        column = self._columns.get(owner, 0)
        with self._locked():
            if self._max_requests is not None and self._cells[_COUNTS:_OUTPUTS, column].sum() >= self._max_requests:
                raise RequestError(
                    429,
                    f"this key has {self._max_requests} requests under way, its limit (--max-requests-per-key)",
                    code="concurrency_limit_exceeded",
                )
            self._check_bucket(_TOKENS, column, self._tokens_per_minute, "use", "tokens")
            self._check_bucket(_REQUESTS, column, self._requests_per_minute, "send", "requests")
            self._cells[_REQUESTS, column] -= 1  # not read where there is no limit
            self._own[column] += 1
        try:
            yield
        finally:
            self._own[column] -= 1

    @contextlib.contextmanager
    def outputs(self, owner: str, count: int) -> Iterator[None]:
        """Counts so many outputs while they are generated; raises `RequestError` 429 above the limit."""
        if self._max_outputs is None:
            yield
            return
        column = self._columns.get(owner, 0)
        with self._locked():
            there = int(self._cells[_OUTPUTS:, column].sum())
            if there + count > self._max_outputs:
                raise RequestError(
                    429,
                    f"this key has {there} outputs under way and asks for {count} more; its limit is "
                    f"{self._max_outputs} (--max-outputs-per-key)",
                    code="concurrency_limit_exceeded",
                )
            self._own_outputs[column] += count
        try:
            yield
        finally:
            self._own_outputs[column] -= count

    def spend(self, owner: str, num_tokens: int) -> None:
        """Takes used tokens from the key's bucket, whose level may become negative."""
        if self._tokens_per_minute is None or (column := self._column(owner)) is None:
            return
        with self._locked():
            self._fill(_TOKENS, column, self._tokens_per_minute)
            self._cells[_TOKENS, column] -= num_tokens

    def delay(self, owner: str) -> float:
        """Seconds until the key may use tokens again; 0 while it has some left."""
        if self._tokens_per_minute is None or (column := self._column(owner)) is None:
            return 0.0
        with self._locked():
            level = self._fill(_TOKENS, column, self._tokens_per_minute)
        return max(0.0, (1 - level) * 60 / self._tokens_per_minute)

    def _column(self, owner: str) -> int | None:
        """The column of an owner; None for that of a batch whose key the server no longer has."""
        return self._columns.get(owner) if self._columns else 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _check_bucket(self, row: int, column: int, per_minute: int | None, verb: str, noun: str) -> None:
        """Raises `RequestError` 429 while a bucket holds less than one; a limit of None has no bucket."""
        if per_minute is not None and (level := self._fill(row, column, per_minute)) < 1:
            raise RequestError(
                429,
                f"this key may {verb} {per_minute} {noun} in a minute (--max-{noun}-per-minute)",
                code="rate_limit_exceeded",
                retry_after=math.ceil((1 - level) * 60 / per_minute),
            )

    def _fill(self, row: int, column: int, per_minute: int) -> float:
        """The present level of a bucket that holds one minute's limit and fills evenly."""
        now, filled = time.monotonic(), self._cells[row + 1, column]
        level = per_minute if filled == 0 else self._cells[row, column] + (now - filled) * per_minute / 60
        self._cells[row, column], self._cells[row + 1, column] = min(level, per_minute), now
        return float(self._cells[row, column])
