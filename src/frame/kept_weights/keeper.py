"""Keeps the memory of weights while no engine does: open files, by rank, with a table that says what lies in them.

A thread of the process that starts engines. It has no device and reads no weight; imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import socket
import threading
from dataclasses import dataclass, replace

from frame.core.processes.channel import Channel, listen, same_user

from .exchange import receive_files, send_files
from .messages import MAX_BYTES, Ask, Keep, Kept, Renew, Suspend, ToKeeper

logger = logging.getLogger("frame.server")

#: Seconds that a worker may take for its side of a question.
_PATIENCE_SECONDS = 10.0
#: Seconds until it listens again where a connection could not be accepted.
_AGAIN_SECONDS = 1.0
#: Files that this process may have open for other things.
_OTHER_FILES = 256


@dataclass(frozen=True)
class _Held:
    """The weights of one rank; without a key nobody may have them."""

    key: str
    table: bytes
    sizes: list[int]
    files: list[int]

    def close(self) -> None:
        for file in self.files:
            os.close(file)


class WeightKeeper:
    """Listens at `address` for the workers of one engine, until `close`."""

    def __init__(self) -> None:
        self.address = f"@frame-weights-{secrets.token_hex(16)}"
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = listen(self.address)
        self._thread = threading.Thread(target=self._serve, name="weight-keeper", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Memory that is kept now."""
        with self._lock:
            return sum(sum(held.sizes) for held in self._held.values())

    def clear(self) -> None:
        """Gives all memory back."""
        with self._lock:
            for rank in list(self._held):
                self._drop(rank)

    def close(self) -> None:
        """Gives all memory back, and listens no more. May be called twice."""
        self._closing.set()
        with contextlib.suppress(OSError):  # closed
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _PATIENCE_SECONDS)
        self._listener.close()
        self.clear()

    def _drop(self, rank: int) -> None:
        if (held := self._held.pop(rank, None)) is not None:
            held.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # closed, or the process has too many files open
                if not self._closing.wait(_AGAIN_SECONDS):
                    logger.warning("the keeper of weights cannot be reached: %s; it tries again", error)
                continue
            connection.settimeout(_PATIENCE_SECONDS)
            channel = Channel(connection, ToKeeper, MAX_BYTES)
            try:
                if same_user(connection) and (message := channel.receive()) is not None:
                    self._answer(channel, message)
            except (OSError, ValueError) as error:
                logger.warning("a worker could not speak with the keeper of its weights: %s", error)
            finally:
                channel.close()

    def _answer(self, channel: Channel, message: ToKeeper) -> None:
        with self._lock:  # files that are being sent must stay open
            held = self._held.get(message.rank)
            if isinstance(message, Ask) and held is not None and held.key == message.key:
                channel.send(Kept(held.table, held.sizes))
                send_files(channel, held.files)
                return
            if isinstance(message, Suspend | Renew):
                if held is None:
                    raise ValueError(f"nothing is kept of rank {message.rank}")
                key, table = (message.key, message.table) if isinstance(message, Renew) else ("", b"")
                self._held[message.rank] = replace(held, key=key, table=table)
                channel.send(Kept())
                return
            self._drop(message.rank)
            if isinstance(message, Keep):
                self._make_room(len(message.sizes))
                files = receive_files(channel, len(message.sizes))
                self._held[message.rank] = _Held(message.key, message.table, message.sizes, files)
            channel.send(Kept(other=isinstance(message, Ask) and held is not None))

    def _make_room(self, count: int) -> None:
        """Lets this process have so many more files open, as far as it may."""
        needed = count + sum(len(held.files) for held in self._held.values()) + _OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
