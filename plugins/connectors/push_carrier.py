"""How the bytes of blocks go from one worker's memory to another's, once both have agreed which. Knows no request."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from frame.interfaces import Mark

from .nixl_wire import Channel
from .peer_wire import send_bytes
from .push_wire import Part, Ready


@dataclass(eq=False)
class Staged:
    """Blocks of a layer in `memory` uint8 [n, block bytes] once `mark` is passed; `start` blocks of it come before.

    `first` is the place of the first in the prompt. `kept` is what the copy reads; `error` what it raised.
    """

    layer: int
    start: int
    first: int
    memory: Tensor
    kept: Tensor
    mark: Mark = field(default_factory=Mark)
    error: Exception | None = None


class Carrier(ABC):
    """Sends bytes; any thread may call it."""

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
