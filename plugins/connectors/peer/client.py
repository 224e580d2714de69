"""Asks one other engine for blocks. After a failure the peer is not asked for a while. Knows no request."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np

from ..blocks.callers import hang_up
from ..blocks.wire import MAX_KEYS, Ask, Held, PeerError, checksum, introduce, receive, receive_into, send
from .options import Address

logger = logging.getLogger("frame.connectors.peer")


class PeerClient:
    """One connection, made when first needed and again after a failure. Any thread may call it; calls take turns.

    `timeout` seconds are the most that the peer gets for each answer, `retry` the pause after a failure.
    """

    def __init__(self, address: Address, *, secret: bytes, space: str, timeout: float, retry: float) -> None:
        self.address = address
        self._secret = secret
        self.space = space
        self._timeout = timeout
        self._retry = retry
        self._resting_until = 0.0
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    @property
    def resting(self) -> bool:
        """Whether the peer failed a moment ago and is not asked now."""
        return time.monotonic() < self._resting_until

    def held(self, keys: Sequence[bytes]) -> bytes:
        """For each key 1 or 0: whether the peer holds that block. Raises `PeerError`."""
        with self._lock:
            try:
                found = b""
                for start in range(0, len(keys), MAX_KEYS):
                    found += self._ask(keys[start : start + MAX_KEYS], fetch=False).held
                return found
            except PeerError as error:
                self._give_up(error)
                raise

    def fetch(self, keys: Sequence[bytes], out: np.ndarray) -> list[int]:
        """Fills the rows of `out` uint8 [n, block_bytes] that the peer holds, and returns them. Raises `PeerError`."""
        with self._lock:
            try:
                answer = self._ask(keys, fetch=True)
                rows = [row for row, one in enumerate(answer.held) if one]
                if len(answer.checksums) != len(rows):
                    raise PeerError(f"{len(answer.checksums)} checksums came for {len(rows)} blocks")
                for row, wanted in zip(rows, answer.checksums, strict=True):
                    data = out[row].data.cast("B")
                    receive_into(self._connected(), data, self._timeout)
                    if checksum(keys[row], data) != wanted:
                        raise PeerError("a block was changed on its way")
                return rows
            except PeerError as error:
                self._give_up(error)
                raise

    def close(self) -> None:
        """Hangs up; a call that waits for an answer fails."""
        self._resting_until = float("inf")
        connection = self._connection
        if connection is not None:
            hang_up(connection)

    def _ask(self, keys: Sequence[bytes], *, fetch: bool) -> Held:
        connection = self._connected()
        send(connection, Ask(list(keys), fetch))
        answer = receive(connection, Held, self._timeout)
        if len(answer.held) != len(keys):
            raise PeerError(f"{len(answer.held)} answers came for {len(keys)} blocks")
        return answer

    def _connected(self) -> socket.socket:
        if self._connection is None:
            if self.resting:
                raise PeerError("it failed a moment ago")
            try:
                self._connection = self._connect()
            except OSError as error:
                raise PeerError(f"it cannot be reached: {error}") from None
            if self.resting:  # `close` did not see this connection
                raise PeerError("it was closed")
            introduce(self._connection, self._secret, self.space, self._timeout)
        return self._connection

    def _connect(self) -> socket.socket:
        if not self.address.path:
            return socket.create_connection((self.address.host, self.address.port), self._timeout)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._timeout)
        try:
            connection.connect(self.address.path)
        except OSError:
            connection.close()
            raise
        return connection

    def _give_up(self, error: PeerError) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if not self.resting:
            logger.warning("peer %s gives no blocks: %s", self.address, error)
            self._resting_until = time.monotonic() + self._retry
