"""The protocol between an engine that sends the blocks of prompts and one that takes them, on top of signed frames.

The sender asks at the engine's one address where the worker of its own rank listens, and then sends it blocks. The
bytes of blocks follow the frame that announces them; they are not signed. Knows no block's content.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ..blocks.mapped_memory import PROBE_BYTES, Offer
from ..blocks.wire import PeerError
from ..nixl.shapes import MAX_LAYERS
from ..nixl.wire import Channel, answer_call, call
from .facts import Facts

#: Most tokens of a prompt, and most blocks of one announcement.
MAX_TOKENS, MAX_BLOCKS = 1 << 26, 1 << 20


class Meet(msgspec.Struct, frozen=True, tag=True):
    """The caller's first message: what must be equal in both engines, and which rank it is."""

    facts: Facts
    rank: int


class Placed(msgspec.Struct, frozen=True, tag=True):
    """The port at which the worker of that rank takes blocks."""

    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError("it names no port")


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Blocks of a prompt of so many tokens follow, all those that tokens behind them read.

    With `waits` the sender that writes itself asks again where there is no room for them now.
    """

    digest: bytes
    num_tokens: int
    waits: bool = False

    def __post_init__(self) -> None:
        if len(self.digest) != 32 or not 0 < self.num_tokens <= MAX_TOKENS:
            raise ValueError("it names no prompt")


class Part(msgspec.Struct, frozen=True, tag=True):
    """The bytes of `count` blocks of layer number `layer` follow, from place `first` of the prompt.

    `checksum` is their CRC-32; -1 where there is none.
    """

    digest: bytes
    layer: int
    first: int
    count: int
    checksum: int = -1

    def __post_init__(self) -> None:
        if self.layer < 0 or self.first < 0 or not 0 < self.count <= MAX_BLOCKS:
            raise ValueError("it names no blocks")


class Written(msgspec.Struct, frozen=True, tag=True):
    """The sender has written blocks itself: of each layer number in `parts` so many from that place of the prompt."""

    digest: bytes
    parts: list[tuple[int, int, int]]

    def __post_init__(self) -> None:
        if any(min(part) < 0 or not 0 < part[2] <= MAX_BLOCKS for part in self.parts):
            raise ValueError("it names no blocks")


class End(msgspec.Struct, frozen=True, tag=True):
    """All blocks of the prompt were sent."""

    digest: bytes


class Drop(msgspec.Struct, frozen=True, tag=True):
    """No further blocks of the prompt are sent, and those that were are worth nothing."""

    digest: bytes


class Have(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Begin` where the prompt is there, or is coming from somewhere else: nothing need be sent."""


class Full(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Begin` where there is no room yet, for a sender that waits: it asks again, or drops the prompt."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The answer yes.

    Where the sender writes to this side's memory itself, `session` names that, and the needed blocks of layer l go to
    the address `addresses[l]`, one after the other.
    """

    session: str = ""
    addresses: list[int] = []

    def __post_init__(self) -> None:
        if len(self.session) > 256 or len(self.addresses) > MAX_LAYERS:
            raise ValueError("it names too much memory")


class No(msgspec.Struct, frozen=True, tag=True):
    """The answer no."""

    reason: str


class Ask(msgspec.Struct, frozen=True, tag=True):
    """What memory of this side may the sender map?"""


class Offered(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ask`: memory for blocks, with `content` at the address `scratch`, which the sender changes."""

    offer: Offer
    scratch: int
    content: bytes


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The sender has mapped what it was offered, and has written this there. The answer is `Ready` or `No`."""

    written: bytes

    def __post_init__(self) -> None:
        if len(self.written) != PROBE_BYTES:
            raise ValueError("it proves nothing")


Message = Begin | Part | Written | End | Drop | Ask | Mapped


@dataclass(frozen=True)
class Meeting:
    """A caller that fits."""

    channel: Channel
    rank: int


def connect(place: tuple[str, int], secret: bytes, meet: Meet, seconds: float) -> tuple[socket.socket, Channel]:
    """A connection to the worker of the caller's rank in the engine at `place`. Raises `PeerError`."""
    connection, channel = _call(place, secret, seconds)
    try:
        answer = _asked(channel, meet, Placed | No, seconds)
    finally:
        connection.close()
    connection, channel = _call((place[0], answer.port), secret, seconds)
    try:
        _asked(channel, meet, Ready | No, seconds)
    except PeerError:
        connection.close()
        raise
    return connection, channel


def meet_caller(connection: socket.socket, secret: bytes, facts: Mapping[int, Facts], seconds: float) -> Meeting:
    """The other side of `connect`, with the facts of each rank that is served; the caller awaits an answer then.

    Raises `PeerError` for a caller that does not fit.
    """
    channel = answer_call(connection, secret)
    meet: Meet = channel.receive(Meet, seconds)
    if meet.rank not in facts:
        wrong = f"there is no rank {meet.rank} here"
    elif (difference := facts[meet.rank].difference(meet.facts)) is not None:
        wrong = f"the engines differ in {difference}"
    else:
        return Meeting(channel, meet.rank)
    channel.send(No(wrong), seconds)
    raise PeerError(f"a sender was refused: {wrong}")


def _call(place: tuple[str, int], secret: bytes, seconds: float) -> tuple[socket.socket, Channel]:
    try:
        connection = socket.create_connection(place, timeout=seconds)
    except (OSError, UnicodeError) as error:  # the latter of a name that none can have
        raise PeerError(f"no connection: {getattr(error, 'strerror', None) or error}") from None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, call(connection, secret, seconds)
    except (PeerError, OSError) as error:
        connection.close()
        raise PeerError(str(error)) from None


def _asked(channel: Channel, meet: Meet, kinds: object, seconds: float) -> Placed:
    channel.send(meet, seconds)
    answer: Placed = channel.receive(kinds, seconds)
    if isinstance(answer, No):
        raise PeerError(answer.reason)
    return answer
