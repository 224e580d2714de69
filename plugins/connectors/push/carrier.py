"""How the bytes of blocks go from one worker's memory to another's, once both have agreed which. Knows no request."""

from __future__ import annotations

import socket
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from frame.interfaces import Mark, SideQueue

from ..blocks.host_arena import Arena
from ..blocks.wire import send_bytes
from ..nixl.wire import Channel
from .wire import Part, Ready

if TYPE_CHECKING:
    from .parcels import Batch, Run


@dataclass(eq=False)
class Staged:
    """Blocks of a layer in `memory` uint8 [n, block bytes] once `mark` is passed; `start` blocks of it come before.

    `memory` is of `arena`. `first` is the place of the first in the prompt. `kept` is what the copy reads; `error` what
    it raised.
    """

    layer: int
    start: int
    first: int
    memory: Tensor
    kept: Tensor
    arena: Arena
    mark: Mark = field(default_factory=Mark)
    error: Exception | None = None


class Carrier(ABC):
    """Sends bytes; any thread may call it."""

    #: whether blocks may be written from where they lie, which is known once the other side has answered
    may_write: bool = False
    #: whether memory of the other side is mapped here
    maps: bool = False

    def meet(self, connection: socket.socket, channel: Channel, place: str, seconds: float) -> Carrier:
        """What sends over a new connection, to the engine at `place`; its end is told to what this returns.

        Raises `PeerError`.
        """
        del connection, channel, place, seconds
        return self

    def writes(self, ready: Ready) -> bool:
        """Whether blocks for who answered `ready` are given to `write`."""
        del ready
        return False

    def write(self, runs: Sequence[Run], caches: Sequence[Tensor], queue: SideQueue) -> Batch | None:
        """Has blocks of `caches` be written, once the main queue has done what it holds now; waits for nothing.

        None, without writing, where the connection has ended. What goes wrong later says the batch.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """The connection is about to end for which `meet` gave this."""
        return

    def checksum(self, staged: Staged, ready: Ready) -> int:
        """That of blocks for who answered `ready`; -1 where they are sent without one."""
        del ready
        return zlib.crc32(staged.memory.view(-1).numpy().data)

    @abstractmethod
    def send(
        self, connection: socket.socket, channel: Channel, part: Part, staged: Staged, ready: Ready, seconds: float
    ) -> None:
        """Sends blocks to who answered `ready`, and tells it so on the channel. Raises `PeerError`."""

    def close(self) -> None:
        """Nothing is sent any more."""
        return


class Stream(Carrier):
    """The bytes follow the frame that announces them, on the same connection."""

    def send(
        self, connection: socket.socket, channel: Channel, part: Part, staged: Staged, ready: Ready, seconds: float
    ) -> None:
        channel.send(part, seconds)
        send_bytes(connection, staged.memory.view(-1).numpy().data, seconds)
