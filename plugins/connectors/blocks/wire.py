"""The protocol between engines on a socket: length-prefixed msgpack frames, and proof that both know the secret.

The listener begins with a random number, and the caller answers with its own. Each side sends an HMAC of both under the
shared secret, so the secret itself is never sent; the caller names the set of blocks that it wants. Knows no block.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import TypeVar

import msgspec

from frame.interfaces import decode, encode

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
#: Most keys of one question, and most bytes of a frame that brings no blocks.
MAX_KEYS = 16384
MAX_FRAME = 1 << 20
_CHALLENGE_BYTES = 32


class PeerError(Exception):
    """The other side is gone, is too slow, does not know the secret, or breaks the protocol."""


class Challenge(msgspec.Struct, frozen=True):
    """The listener's first frame."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True):
    """The caller's answer to a challenge; `space` names a set of blocks: of equal weights, layout and rank."""

    nonce: bytes
    proof: bytes
    space: str


class Welcome(msgspec.Struct, frozen=True):
    """The listener's frame that lets the caller ask, which is told by the proof whose blocks it takes."""

    proof: bytes


class Ask(msgspec.Struct, frozen=True):
    """Which of these blocks are held; with `fetch` also their bytes."""

    keys: list[bytes]
    fetch: bool = False


class Held(msgspec.Struct, frozen=True):
    """For each key 1 or 0; after a fetch the bytes of those that are held follow, in this order.

    `checksums` are theirs: a socket may lose or change bytes where machines, proxies or kernels fail.
    """

    held: bytes
    checksums: list[bytes] = []


VERSION = 3


def send(connection: socket.socket, message: msgspec.Struct, payload: bytes | memoryview = b"") -> None:
    """Sends a frame, and `payload` behind it. Raises `PeerError`."""
    data = encode(message)
    try:
        connection.sendall(_LENGTH.pack(len(data)) + data)
        if len(payload):
            connection.sendall(payload)
    except OSError as error:
        raise PeerError(f"the connection failed: {error}") from None


def send_bytes(connection: socket.socket, data: memoryview, seconds: float) -> None:
    """Sends the bytes that a frame announced; each piece of them within `seconds`. Raises `PeerError`."""
    try:
        connection.settimeout(seconds)
        while data:
            data = data[connection.send(data) :]
    except OSError as error:
        raise PeerError(f"the connection failed: {error}") from None


def receive(connection: socket.socket, kind: type[T], seconds: float | None, limit: int = MAX_FRAME) -> T:
    """The next frame, all of it within `seconds`. Raises `PeerError`, also for one too long or of another kind."""
    deadline = None if seconds is None else time.monotonic() + seconds
    header = bytearray(_LENGTH.size)
    _receive_until(connection, memoryview(header), deadline)
    (size,) = _LENGTH.unpack(header)
    if size > limit:
        raise PeerError(f"a frame of {size} bytes is announced, at most {limit} are taken")
    data = bytearray(size)
    _receive_until(connection, memoryview(data), deadline)
    try:
        return decode(bytes(data), kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"a frame is not a {kind.__name__}: {error}") from None


def checksum(key: bytes, data: bytes | memoryview) -> bytes:
    """Of the bytes of the block with that key: those of another block do not pass for them."""
    return hashlib.blake2b(data, digest_size=16, key=key[:64]).digest()


def receive_into(connection: socket.socket, out: memoryview, seconds: float) -> None:
    """Fills `out` within `seconds`. Raises `PeerError` when the connection ends before."""
    _receive_until(connection, out, time.monotonic() + seconds)


def _receive_until(connection: socket.socket, out: memoryview, deadline: float | None) -> None:
    try:
        while out:
            # a trickle of single bytes must not outlast the deadline
            connection.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            count = connection.recv_into(out)
            if count == 0:
                raise PeerError("the connection was closed")
            out = out[count:]
    except OSError as error:
        raise PeerError(f"the connection failed: {error}") from None


def admit(connection: socket.socket, secret: bytes, seconds: float) -> str:
    """The listener's side of the handshake; returns the caller's space. Raises `PeerError` for a wrong proof."""
    nonce = secrets.token_bytes(_CHALLENGE_BYTES)
    send(connection, Challenge(VERSION, nonce))
    hello = receive(connection, Hello, seconds, limit=4096)
    both = nonce + hello.nonce
    right = hmac.compare_digest(hello.proof, _proof(secret, b"caller", both))
    if not right or len(hello.nonce) != _CHALLENGE_BYTES:
        raise PeerError("the caller does not know the secret")
    send(connection, Welcome(_proof(secret, b"listener", both)))
    return hello.space


def introduce(connection: socket.socket, secret: bytes, space: str, seconds: float) -> None:
    """The caller's side of the handshake. Raises `PeerError`, also for a listener that does not know the secret."""
    challenge = receive(connection, Challenge, seconds, limit=4096)
    if challenge.version != VERSION:
        raise PeerError(f"the peer speaks version {challenge.version}, not {VERSION}")
    if len(challenge.nonce) != _CHALLENGE_BYTES:
        raise PeerError("the peer's challenge is not one of this protocol")
    nonce = secrets.token_bytes(_CHALLENGE_BYTES)
    both = challenge.nonce + nonce
    send(connection, Hello(nonce, _proof(secret, b"caller", both), space))
    welcome = receive(connection, Welcome, seconds, limit=4096)
    if not hmac.compare_digest(welcome.proof, _proof(secret, b"listener", both)):
        raise PeerError("the peer does not know the secret")


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"frame peer 3 " + side + b" " + nonces, "sha256")
