"""The API keys of a listener, and their limits on running requests and outputs, and on requests and tokens a minute.

The counts lie in memory that the parent opened and all API processes share: one row a process, which is cleared when a
dead process is replaced, and token buckets for each key.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import math
import mmap
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..config.server import ServerConfig
from ..interfaces.errors import RequestError

#: Most API processes of a server.
MAX_PROCESSES = 64
#: Rows of the memory: a bucket's level and when it was filled last, for requests and for tokens; then requests and
#: outputs under way, by process.
_REQUESTS, _TOKENS, _COUNTS = 0, 2, 4
_OUTPUTS = _COUNTS + MAX_PROCESSES


class KeyRing:
    """The configured keys. Compares a key with all of them in constant time; stores only digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def owner(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """The digest of the valid key in the headers (`Authorization: Bearer KEY` or `x-api-key: KEY`).

        None without a valid key; "" when no keys are configured.
        """
        if not self._digests:
            return ""
        owner = None
        for name, value in headers:
            presented = None
            if name == b"x-api-key":
                presented = value.strip()
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                presented = value[7:].strip()
            if presented is not None:
                digest = hashlib.sha256(presented).digest()
                found = False
                for known in self._digests:  # no early exit, so that the time does not depend on which key matched
                    found |= hmac.compare_digest(digest, known)
                owner = digest.hex() if found else owner
        return owner


class KeyLimits:
    """Called by the ingress for each request that needs the engine, and by the generations."""

    def __init__(self, server: ServerConfig, descriptor: int | None = None, process: int = 0) -> None:
        self._server = server
        self._columns = {hashlib.sha256(key.encode()).hexdigest(): index for index, key in enumerate(server.api_key)}
        self._descriptor = os.memfd_create("frame-limits") if descriptor is None else descriptor
        shape = (_OUTPUTS + MAX_PROCESSES, max(1, len(server.api_key)))
        os.ftruncate(self._descriptor, shape[0] * shape[1] * 8)
        self._cells = np.frombuffer(mmap.mmap(self._descriptor, shape[0] * shape[1] * 8), np.float64).reshape(shape)
        self._own, self._own_outputs = self._cells[_COUNTS + process], self._cells[_OUTPUTS + process]
        self._own[:] = self._own_outputs[:] = 0

    @contextlib.contextmanager
    def admit(self, owner: str) -> Iterator[None]:
        """Counts a request of the key with this digest while it runs; raises `RequestError` 429 above the limit."""
        server, most = self._server, self._server.max_requests_per_key
        if most is None and server.max_tokens_per_minute is None and server.max_requests_per_minute is None:
            yield
            return
        column = self._columns.get(owner, 0)
        with self._locked():
            if most is not None and self._cells[_COUNTS:_OUTPUTS, column].sum() >= most:
                raise RequestError(
                    429,
                    f"this key has {most} requests under way, its limit (--max-requests-per-key)",
                    code="concurrency_limit_exceeded",
                )
            self._check_bucket(_TOKENS, column, server.max_tokens_per_minute, "use", "tokens")
            self._check_bucket(_REQUESTS, column, server.max_requests_per_minute, "send", "requests")
            self._cells[_REQUESTS, column] -= 1  # not read where there is no limit
            self._own[column] += 1
        try:
            yield
        finally:
            self._own[column] -= 1

    @contextlib.contextmanager
    def outputs(self, owner: str, count: int) -> Iterator[None]:
        """Counts so many outputs while they are generated; raises `RequestError` 429 above the limit."""
        if (most := self._server.max_outputs_per_key) is None:
            yield
            return
        column = self._columns.get(owner, 0)
        with self._locked():
            there = int(self._cells[_OUTPUTS:, column].sum())
            if there + count > most:
                raise RequestError(
                    429,
                    f"this key has {there} outputs under way and asks for {count} more; its limit is "
                    f"{most} (--max-outputs-per-key)",
                    code="concurrency_limit_exceeded",
                )
            self._own_outputs[column] += count
        try:
            yield
        finally:
            self._own_outputs[column] -= count

    def spend(self, owner: str, num_tokens: int) -> None:
        """Takes used tokens from the key's bucket, whose level may become negative."""
        if (rate := self._server.max_tokens_per_minute) is None or (column := self._column(owner)) is None:
            return
        with self._locked():
            self._fill(_TOKENS, column, rate)
            self._cells[_TOKENS, column] -= num_tokens

    def delay(self, owner: str, num_held: int = 0) -> float:
        """Seconds until the key may use tokens again; 0 while it has more left than `num_held`."""
        if (rate := self._server.max_tokens_per_minute) is None or (column := self._column(owner)) is None:
            return 0.0
        with self._locked():
            level = self._fill(_TOKENS, column, rate) - num_held
        return max(0.0, (1 - level) * 60 / rate)

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
