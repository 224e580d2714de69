"""Blocks that a worker writes to the device of another engine's worker on the same machine, where it can map that.

The other worker offers memory; this one reads a probe there and writes one, and both look at what they find. Then
blocks are copied there, from a thread that waits for it, and the connection says which have come. Where anything of
that fails blocks go over the connection. Knows no request.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable

import numpy as np
from msgspec import structs
from torch import Tensor

from ..blocks.callers import is_over
from ..blocks.mapped_memory import PROBE_BYTES, Mapper, Opened, Sharing
from ..blocks.wire import PeerError
from ..nixl.wire import Channel
from .carrier import Carrier, Staged, Stream
from .wire import Ask, Mapped, No, Offered, Part, Ready

logger = logging.getLogger("frame.connectors.push")

#: Bytes of host memory through which blocks of the device go to the connection, unless one of them has more.
_PIECE_BYTES = 4 << 20
_MAX_TOLD = 256


class DirectCarrier(Carrier):
    """See the module. `pinned(n)` gives host memory, uint8 [n]."""

    def __init__(self, sharing: Sharing, machine: str, pinned: Callable[[int], Tensor], *, checksums: bool) -> None:
        self._sharing = sharing
        self._mapper = Mapper(sharing, machine)
        self._pinned = pinned
        self._checksums = checksums
        self._told: set[tuple[str, str]] = set()

    def meet(self, channel: Channel, place: str, seconds: float) -> Carrier:
        opened, reason = self._open(channel, seconds)
        if opened is None and (place, reason) not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add((place, reason))
            logger.info("blocks for the engine at %s cross host memory: %s", place, reason)
        return Way(self._sharing, opened, self._pinned, checksums=self._checksums)

    def send(
        self, connection: socket.socket, channel: Channel, part: Part, staged: Staged, ready: Ready, seconds: float
    ) -> None:
        raise PeerError("nobody was met")

    def _open(self, channel: Channel, seconds: float) -> tuple[Opened | None, str]:
        """What the other worker lets this one map, or why not."""
        channel.send(Ask(), seconds)
        offered: Offered | No = channel.receive(Offered | No, seconds)
        if isinstance(offered, No):
            return None, offered.reason
        written = secrets.token_bytes(PROBE_BYTES)
        try:
            opened = self._mapper.open(offered.offer)
        except (RuntimeError, ValueError) as error:
            return None, str(error)
        try:
            place = int(opened.addresses(np.array([offered.scratch]), np.array([PROBE_BYTES]))[0])
            if self._mapper.read(place) != offered.content:
                raise RuntimeError("what is read there is not what was written")
            self._mapper.write(place, written)
            channel.send(Mapped(written), seconds)
            answer: Ready | No = channel.receive(Ready | No, seconds)
        except PeerError:
            opened.close()
            raise
        except (RuntimeError, ValueError) as error:
            opened.close()
            return None, str(error)
        if isinstance(answer, No):
            opened.close()
            return None, answer.reason
        return opened, ""


class Way(Carrier):
    """To one worker, over one connection; for one thread. `opened` is what is mapped of its memory, if anything is."""

    def __init__(
        self, sharing: Sharing, opened: Opened | None, pinned: Callable[[int], Tensor], *, checksums: bool
    ) -> None:
        self._sharing = sharing
        self._opened = opened
        self._pinned = pinned
        self._checksums = checksums
        self._stream = Stream()
        self._piece: Tensor | None = None
        self.from_device = opened is not None

    def leave(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def checksum(self, staged: Staged, ready: Ready) -> int:
        return -1 if ready.session or staged.arena.on_device else self._stream.checksum(staged, ready)

    def send(
        self, connection: socket.socket, channel: Channel, part: Part, staged: Staged, ready: Ready, seconds: float
    ) -> None:
        if ready.session:
            self._write(connection, part, staged, ready)
            channel.send(part, seconds)
        elif staged.arena.on_device:
            self._bounce(connection, channel, part, staged, ready, seconds)
        else:
            self._stream.send(connection, channel, part, staged, ready, seconds)

    def _write(self, connection: socket.socket, part: Part, staged: Staged, ready: Ready) -> None:
        if self._opened is None or part.layer >= len(ready.addresses):
            raise PeerError("it names no memory for a layer")
        if is_over(connection):  # what was promised is kept for this side until it hangs up as well
            raise PeerError("the connection was closed")
        size = staged.memory.numel()
        target = ready.addresses[part.layer] + staged.start * staged.memory.shape[1]
        place = self._opened.addresses(np.array([target]), np.array([size]))
        self._copy(staged.memory, int(place[0]))

    def _bounce(
        self, connection: socket.socket, channel: Channel, part: Part, staged: Staged, ready: Ready, seconds: float
    ) -> None:
        """Sends blocks that lie on the device, some at a time, through a small piece of host memory."""
        width = staged.memory.shape[1]
        count = max(1, _PIECE_BYTES // width)
        if self._piece is None or len(self._piece) < min(count, part.count) * width:
            self._piece = self._pinned(count * width)
        for start in range(0, part.count, count):
            some = staged.memory[start : start + count]
            memory = self._piece[: some.numel()].view(some.shape)
            self._copy(some, memory.data_ptr())
            piece = Staged(staged.layer, staged.start + start, part.first + start, memory, staged.kept, staged.arena)
            checksum = self._stream.checksum(piece, ready) if self._checksums else -1
            sent = structs.replace(part, first=part.first + start, count=len(some), checksum=checksum)
            self._stream.send(connection, channel, sent, piece, ready, seconds)

    def _copy(self, source: Tensor, target: int) -> None:
        """Waits for the copy: when it raises none is under way."""
        self._sharing.move(source.data_ptr(), target, source.numel()).wait()
