"""Blocks in host memory that other engines may ask for, and the threads that answer them. Knows no request."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections import OrderedDict
from contextlib import suppress

import numpy as np

from ..blocks.callers import Callers
from ..blocks.wire import MAX_KEYS, Ask, Held, PeerError, admit, checksum, receive, send
from .options import Address

#: Connections at a time; further ones are closed at once.
MAX_CALLERS = 64
#: Blocks of one fetch.
MAX_FETCH = 32
_HELLO_SECONDS = 5.0


class HostBlocks:
    """Copies of blocks by hash, at most `max_bytes`; those unused for longest go first. Any thread may call it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()
        self.space = ""

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._used

    def touch(self, key: bytes) -> bool:
        """Marks the block as used now; False when it is not there."""
        return self.get(key) is not None

    def get(self, key: bytes) -> bytes | None:
        """The block's bytes, which then counts as used now."""
        with self._lock:
            data = self._blocks.get(key)
            if data is not None:
                self._blocks.move_to_end(key)
            return data

    def put(self, key: bytes, data: np.ndarray) -> bool:
        """Keeps a copy of `data`; False when it is larger than all that may be kept."""
        if data.nbytes > self._max_bytes:
            return False
        copy = data.tobytes()
        with self._lock:
            self._used += len(copy) - len(self._blocks.pop(key, b""))
            self._blocks[key] = copy
            while self._used > self._max_bytes:
                self._used -= len(self._blocks.popitem(last=False)[1])
        return True

    def clear(self) -> None:
        """Removes all blocks."""
        with self._lock:
            self._blocks.clear()
            self._used = 0


class PeerServer:
    """Answers callers until `close`. Raises `ValueError` when the address cannot be used."""

    def __init__(self, address: Address, blocks: HostBlocks, *, secret: bytes, timeout: float) -> None:
        self._address = address
        self._blocks = blocks
        self._secret = secret
        self._timeout = timeout
        try:
            listener = _listen(address)
        except OSError as error:
            raise ValueError(f"the peer connector cannot listen on {address}: {error}") from None
        self._callers = Callers(listener, self._serve, most=MAX_CALLERS, name="peer")

    def close(self) -> None:
        """Closes all connections and the listener."""
        if self._callers.close() and self._address.path:  # later the path may be another server's
            with suppress(OSError):
                os.unlink(self._address.path)

    def _serve(self, caller: socket.socket) -> None:
        space = admit(caller, self._secret, _HELLO_SECONDS)
        while True:
            # a caller may keep its connection for later
            self._answer(caller, receive(caller, Ask, None), space)

    def _answer(self, caller: socket.socket, ask: Ask, space: str) -> None:
        if len(ask.keys) > (MAX_FETCH if ask.fetch else MAX_KEYS):
            raise PeerError(f"{len(ask.keys)} blocks are asked for at once")
        found = [self._blocks.get(key) if space == self._blocks.space else None for key in ask.keys]
        held, blocks = bytes(data is not None for data in found), list[tuple[bytes, bytes]]()
        if ask.fetch:
            blocks = [(key, data) for key, data in zip(ask.keys, found, strict=True) if data is not None]
        caller.settimeout(self._timeout)
        send(caller, Held(held, [checksum(*block) for block in blocks]), b"".join(data for _, data in blocks))


def _listen(address: Address) -> socket.socket:
    if not address.path:
        return socket.create_server((address.host, address.port), family=_family(address.host))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_abandoned(address.path)
        # from the moment that the file exists; a umask would be that of files that other threads make
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(address.path)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _remove_abandoned(path: str) -> None:
    """Removes a socket on which nobody listens any more; anything else stays, and binding fails."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
