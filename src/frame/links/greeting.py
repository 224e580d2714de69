"""Connections between machines: a listener, and those who connect to it from elsewhere.

Before anything else is read, each side proves that it knows the key. Then the one who connects says in JSON who it is.
What follows is neither encrypted nor signed. Knows no worker and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import json
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .lost import end_when_lost

logger = logging.getLogger("frame.server")

#: Seconds for the exchange that begins a connection.
GREETING_SECONDS = 10.0
#: Connections that may be in that exchange at once, and bytes of what is said in it.
MOST_GREETINGS, MOST_BYTES = 64, 1 << 20
_NONCE_BYTES, _PROOF_BYTES = 32, hashlib.sha256().digest_size
_LENGTH = struct.Struct(">I")


class RefusedError(ValueError):
    """The other side refuses, or is not what it should be."""


class Listener:
    """Accepts connections at `host`:`port`, 0 for any free one, from those who know `key`; threads greet them.

    Each greeted connection and what it said of itself is kept for `next`, or given to `greeted`, which one of these
    threads calls. Raises `ValueError` where it cannot listen; `remedy` says what the user may change.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        remedy: str = "choose another --master-port or --master-addr, on all nodes",
        greeted: Callable[[socket.socket, dict[str, Any]], None] | None = None,
    ) -> None:
        self._key = key
        self._kept: queue.SimpleQueue[tuple[socket.socket, dict[str, Any]] | None] = queue.SimpleQueue()
        self._greeted = greeted or (lambda connection, said: self._kept.put((connection, said)))
        self._greetings = threading.BoundedSemaphore(MOST_GREETINGS)
        self._wrong: set[str] = set()  # addresses of those with another key, each of which is named once
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=MOST_GREETINGS)
        except OSError as error:
            why = (error.strerror or str(error)).partition(" (while")[0]
            raise ValueError(f"cannot listen at {host}:{port} for the other machines: {why}; {remedy}") from None
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="frame-nodes", daemon=True).start()

    def next(self, seconds: float | None) -> tuple[socket.socket, dict[str, Any]] | None:
        """The next connection whose other end is known, and what it said of itself.

        None after so many seconds, and once it is closed.
        """
        try:
            return self._kept.get(timeout=None if seconds is None else max(0.0, seconds))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stops listening; connections stay."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._kept.put(None)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            if self._greetings.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(connection,), name="frame-greeting", daemon=True).start()
            else:
                connection.close()

    def _greet(self, connection: socket.socket) -> None:
        try:
            said = _answer(connection, self._key)
        except (OSError, ValueError, RecursionError) as error:  # a stranger
            if isinstance(error, RefusedError):
                self._name(connection, error)
            connection.close()
        else:
            self._greeted(connection, said)
        finally:
            self._greetings.release()

    def _name(self, connection: socket.socket, error: RefusedError) -> None:
        """Tells the user of a machine that is refused, once for each address, so that nobody fills the log."""
        with contextlib.suppress(OSError):
            place = connection.getpeername()[0]
            if place not in self._wrong and len(self._wrong) < MOST_GREETINGS:
                self._wrong.add(place)
                logger.warning("whoever connects from %s is refused: %s", place, error)


def connect(host: str, port: int, key: bytes, said: dict[str, Any], *, own: str = "") -> socket.socket:
    """A connection to a `Listener`, from this machine's address `own` where given, which is told `said`.

    Raises `OSError` where nobody listens, `RefusedError` where whoever does has another key, or `own` is not an address
    of this machine.
    """
    source = (own, 0) if own else None
    with _of_this_machine(own):
        connection = socket.create_connection((host, port), GREETING_SECONDS, source)
    latest = time.monotonic() + GREETING_SECONDS
    try:
        theirs, mine = _read(connection, _NONCE_BYTES, latest), secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(mine + _proof(key, b"node", theirs + mine))
        try:
            proof = _read(connection, _PROOF_BYTES, latest)
        except ConnectionError:
            proof = b""
        _check_listener(key, mine + theirs, proof, f"{host}:{port}")
        send_json(connection, said)
    except BaseException:
        connection.close()
        raise
    return _lasting(connection)


async def connect_async(host: str, port: int, key: bytes, said: dict[str, Any], *, own: str = "") -> socket.socket:
    """Like `connect`, for an event loop; the connection does not block."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(GREETING_SECONDS):
        family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            with _of_this_machine(own):
                if own:
                    connection.bind((own, 0))
                await loop.sock_connect(connection, address)
            theirs, mine = await _read_async(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
            if len(theirs) < _NONCE_BYTES:
                raise ConnectionResetError(errno.ECONNRESET, "the other side has closed the connection")
            await loop.sock_sendall(connection, mine + _proof(key, b"node", theirs + mine))
            _check_listener(key, mine + theirs, await _read_async(connection, _PROOF_BYTES), f"{host}:{port}")
            data = json.dumps(said).encode()
            await loop.sock_sendall(connection, _LENGTH.pack(len(data)) + data)
            _lasting(connection).setblocking(False)
        except BaseException:
            connection.close()
            raise
    return connection


@contextlib.contextmanager
def _of_this_machine(own: str) -> Iterator[None]:
    """Raises `RefusedError` where a connection from the address `own` shows that this machine has none like it."""
    try:
        yield
    except OSError as error:
        if own and error.errno == errno.EADDRNOTAVAIL:
            raise RefusedError(f"the own address {own} is none of this machine's") from None
        raise


def send_json(connection: socket.socket, value: Any) -> None:
    """Sends a JSON value, as `receive_json` reads it."""
    send_bytes(connection, json.dumps(value).encode())


def receive_json(connection: socket.socket, latest: float | None = None) -> Any:
    """The next JSON value, all of it until `latest`; raises `OSError` at the end, `ValueError` for anything else."""
    return json.loads(receive_bytes(connection, latest))


def send_bytes(connection: socket.socket, data: bytes) -> None:
    """Sends bytes, as `receive_bytes` reads them."""
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_bytes(connection: socket.socket, latest: float | None = None) -> bytes:
    """The next bytes, all of them until `latest`; raises `OSError` at the end, `ValueError` where they are too many."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, latest))
    if length > MOST_BYTES:
        raise ValueError(f"{length} bytes were announced, at most {MOST_BYTES} are taken")
    return _read(connection, length, latest)


def _answer(connection: socket.socket, key: bytes) -> dict[str, Any]:
    """The listener's side of a greeting; returns what the other says of itself."""
    connection.settimeout(GREETING_SECONDS)
    latest = time.monotonic() + GREETING_SECONDS
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine)
    theirs = _read(connection, _NONCE_BYTES, latest)
    proof = _read(connection, _PROOF_BYTES, latest)
    if not hmac.compare_digest(proof, _proof(key, b"node", mine + theirs)):
        raise RefusedError("it has another key, or is no machine of frame")
    connection.sendall(_proof(key, b"engine", theirs + mine))
    said = receive_json(connection, latest)
    if not isinstance(said, dict):
        raise RefusedError("it does not describe itself")
    _lasting(connection)
    return said


def _lasting(connection: socket.socket) -> socket.socket:
    """Without a time limit; a machine that no longer answers ends it."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_when_lost(connection)
    return connection


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, side + nonces, hashlib.sha256).digest()


def _check_listener(key: bytes, nonces: bytes, proof: bytes, where: str) -> None:
    """Raises `RefusedError` unless `proof` shows that the listener knows the key."""
    if not hmac.compare_digest(proof, _proof(key, b"engine", nonces)):
        raise RefusedError(f"whoever listens at {where} has another key, or is no engine of frame")


async def _read_async(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the connection ends before."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < size and (part := await asyncio.get_running_loop().sock_recv(connection, size - len(data))):
            data += part
    return data


def _read(connection: socket.socket, size: int, latest: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if latest is not None:  # a trickle of single bytes must not outlast it
            connection.settimeout(max(latest - time.monotonic(), 1e-3))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection has ended")
        data += part
    return bytes(data)
