"""Connections between machines: a listener of the engine's, and those who connect to it from elsewhere.

Before anything else is read, each side proves that it knows the key. Then the one who connects says in JSON who it is.
Knows no worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import socket
import struct
import threading
import time
from typing import Any

#: Seconds for the exchange that begins a connection.
GREETING_SECONDS = 10.0
#: Connections that may be in that exchange at once, and bytes of what is said in it.
MOST_GREETINGS, MOST_BYTES = 64, 1 << 20
_NONCE_BYTES = 32
_LENGTH = struct.Struct(">I")
#: Seconds after which a machine that does not answer is given up.
_LOST_SECONDS = 20


class RefusedError(ValueError):
    """The other side refuses, or is not what it should be."""


class Listener:
    """Accepts connections at `host`:`port`, 0 for any free one, from those who know `key`; threads greet them.

    Raises `ValueError` where it cannot listen.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._key = key
        self._greeted: queue.SimpleQueue[tuple[socket.socket, dict[str, Any]]] = queue.SimpleQueue()
        self._greetings = threading.BoundedSemaphore(MOST_GREETINGS)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=MOST_GREETINGS)
        except OSError as error:
            why = (error.strerror or str(error)).partition(" (while")[0]
            raise ValueError(
                f"cannot listen at {host}:{port} for the other nodes: {why}; choose another --master-port or "
                "--master-addr, on all nodes"
            ) from None
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="frame-nodes", daemon=True).start()

    def next(self, seconds: float) -> tuple[socket.socket, dict[str, Any]] | None:
        """The next connection whose other end is known, and what it said of itself; None after so many seconds."""
        try:
            return self._greeted.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stops listening; connections stay."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

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
        except (OSError, ValueError, RecursionError):  # a stranger
            connection.close()
        else:
            self._greeted.put((connection, said))
        finally:
            self._greetings.release()


def connect(host: str, port: int, key: bytes, said: dict[str, Any], *, own: str = "") -> socket.socket:
    """A connection to a `Listener`, from this machine's address `own` where given, which is told `said`.

    Raises `OSError` where nobody listens, `RefusedError` where whoever does has another key.
    """
    source = (own, 0) if own else None
    connection = socket.create_connection((host, port), GREETING_SECONDS, source)
    latest = time.monotonic() + GREETING_SECONDS
    try:
        theirs, mine = _read(connection, _NONCE_BYTES, latest), secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(mine + _proof(key, b"node", theirs + mine))
        try:
            proof = _read(connection, hashlib.sha256().digest_size, latest)
        except ConnectionError:
            proof = b""
        if not hmac.compare_digest(proof, _proof(key, b"engine", mine + theirs)):
            raise RefusedError(f"whoever listens at {host}:{port} has another key, or is no engine of frame")
        send_json(connection, said)
    except BaseException:
        connection.close()
        raise
    return _lasting(connection)


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
    proof = _read(connection, hashlib.sha256().digest_size, latest)
    if not hmac.compare_digest(proof, _proof(key, b"node", mine + theirs)):
        raise RefusedError("another key")
    connection.sendall(_proof(key, b"engine", theirs + mine))
    said = receive_json(connection, latest)
    if not isinstance(said, dict):
        raise RefusedError("not a description")
    _lasting(connection)
    return said


def _lasting(connection: socket.socket) -> socket.socket:
    """Without a time limit; a machine that no longer answers ends it."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_SECONDS)
    return connection


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, side + nonces, hashlib.sha256).digest()


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
