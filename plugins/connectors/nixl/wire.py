"""The protocol between engines that exchange KV blocks: who may speak, and what is asked and answered.

Both sides prove that they know the secret by an HMAC of both sides' random numbers; every frame after that carries an
HMAC under a key of this connection, so that nobody in between can change, repeat or add one. Knows no block.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from typing import Any

import msgspec

from frame.interfaces import decode, encode

from ..blocks.wire import Challenge, PeerError, receive, send
from .messages import AgentFacts
from .shapes import VERSION, Facts

_NONCE_BYTES = 32
_HELLO_SECONDS = 5.0


class Hello(msgspec.Struct, frozen=True):
    """The caller's answer to a challenge."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True):
    """The listener's proof that it knows the secret, too."""

    proof: bytes


class Sealed(msgspec.Struct, frozen=True):
    """Any later frame: a message and its HMAC."""

    tag: bytes
    body: bytes


class Introduce(msgspec.Struct, frozen=True, tag=True):
    """The caller's first question: is this the engine of that id, and does it fit?"""

    engine: str
    facts: Facts


class Lease(msgspec.Struct, frozen=True, tag=True):
    """Asks for the blocks of a request's first `num_tokens` tokens; `digest` shows that the caller knows them."""

    request: str
    num_tokens: int
    digest: bytes


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Asks for more time."""

    ticket: bytes


class Release(msgspec.Struct, frozen=True, tag=True):
    """The caller reads nothing, or nothing more, of the request's blocks; fields as of `Lease` and `Granted`."""

    request: str
    num_tokens: int
    digest: bytes
    ticket: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The answer no."""

    reason: str


class Met(msgspec.Struct, frozen=True, tag=True):
    """The answer to one that fits: what this engine is."""

    facts: Facts


class Done(msgspec.Struct, frozen=True, tag=True):
    """The answer yes."""


class Renewed(msgspec.Struct, frozen=True, tag=True):
    """The lease goes on for `seconds` from now."""

    seconds: float


class Granted(msgspec.Struct, frozen=True, tag=True):
    """`blocks[g]` of the KV groups may be read with these agents, by rank, for `seconds` from now."""

    ticket: bytes
    seconds: float
    blocks: list[list[int]]
    agents: list[AgentFacts]


Question = Introduce | Lease | Renew | Release
Answer = Refused | Met | Done | Renewed | Granted


class Channel:
    """A connection to a side that has proved to know the secret. One thread at a time."""

    def __init__(self, connection: socket.socket, key: bytes, *, calls: bool) -> None:
        self._connection = connection
        self._key = key
        self._out, self._in = (b"caller", b"listener") if calls else (b"listener", b"caller")
        self._sent = self._received = 0

    def send(self, message: msgspec.Struct, seconds: float) -> None:
        """Sends a message within `seconds`. Raises `PeerError`."""
        body = encode(message)
        try:
            self._connection.settimeout(seconds)
        except OSError as error:  # another thread has closed it
            raise PeerError(f"the connection failed: {error}") from None
        send(self._connection, Sealed(self._tag(self._out, self._sent, body), body))
        self._sent += 1

    def receive(self, kind: Any, seconds: float | None) -> Any:
        """The next message, of a type or one of several, all of it within `seconds`.

        Raises `PeerError`, also for one that is not the peer's.
        """
        sealed = receive(self._connection, Sealed, seconds)
        if not hmac.compare_digest(sealed.tag, self._tag(self._in, self._received, sealed.body)):
            raise PeerError("a frame was changed on its way")
        self._received += 1
        try:
            return decode(sealed.body, kind)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PeerError(f"a frame cannot be read: {error}") from None

    def _tag(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8, "little") + body, "sha256")


def answer_call(connection: socket.socket, secret: bytes) -> Channel:
    """The listener's side of the handshake. Raises `PeerError` for a caller that does not know the secret."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(_HELLO_SECONDS)
    send(connection, Challenge(VERSION, nonce))
    hello = receive(connection, Hello, _HELLO_SECONDS, limit=4096)
    both = nonce + hello.nonce
    if len(hello.nonce) != _NONCE_BYTES or not hmac.compare_digest(hello.proof, _proof(secret, b"caller", both)):
        raise PeerError("the caller does not know the secret")
    send(connection, Proof(_proof(secret, b"listener", both)))
    return Channel(connection, _proof(secret, b"session", both), calls=False)


def call(connection: socket.socket, secret: bytes, seconds: float) -> Channel:
    """The caller's side of the handshake; `seconds` for each answer.

    Raises `PeerError` for a listener that does not know the secret.
    """
    challenge = receive(connection, Challenge, seconds, limit=4096)
    if challenge.version != VERSION:
        raise PeerError(f"it speaks version {challenge.version} of the protocol, not {VERSION}")
    if len(challenge.nonce) != _NONCE_BYTES:
        raise PeerError("its challenge is not one of this protocol")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    both = challenge.nonce + nonce
    connection.settimeout(seconds)
    send(connection, Hello(nonce, _proof(secret, b"caller", both)))
    try:
        proof = receive(connection, Proof, seconds, limit=4096)
    except PeerError as error:
        raise PeerError(f"it did not accept the secret of secret_file ({error})") from None
    if not hmac.compare_digest(proof.proof, _proof(secret, b"listener", both)):
        raise PeerError("it does not know the secret of secret_file")
    return Channel(connection, _proof(secret, b"session", both), calls=True)


def _proof(secret: bytes, what: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"frame nixl 1 " + what + b" " + nonces, "sha256")
