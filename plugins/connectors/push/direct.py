"""Blocks that a worker writes to the device of another engine's worker on the same machine, where it can map that.

The other worker offers memory; this one reads a probe there and writes one, and both look at what they find. Then a
kernel of this device writes blocks there from where they lie in the cache, one launch for all that a layer has filled,
and the connection says which have come. Where anything of that fails blocks go over the connection.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np
from torch import Tensor

from frame.interfaces import Mark, SideQueue

from ..blocks.mapped_memory import PROBE_BYTES, Mapper, Opened, Sharing
from ..blocks.wire import PeerError
from ..nixl.wire import Channel
from .buffer import DIRECT
from .carrier import Carrier, Stream
from .parcels import Batch, Run
from .wire import Ask, Mapped, No, Offered, Ready

logger = logging.getLogger("frame.connectors.push")

_MAX_TOLD = 256


class DirectCarrier(Stream):
    """See the module."""

    may_write = True

    def __init__(self, sharing: Sharing, machine: str) -> None:
        self._sharing = sharing
        self._mapper = Mapper(sharing, machine, self._copy)
        self._told: set[tuple[str, str]] = set()

    def meet(self, connection: socket.socket, channel: Channel, place: str, seconds: float) -> Carrier:
        opened, reason = self._open(channel, seconds)
        if opened is None and (place, reason) not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add((place, reason))
            logger.info("blocks for the engine at %s cross host memory: %s", place, reason)
        return Way(self._sharing, connection, opened)

    def _copy(self, source: int, target: int, num_bytes: int) -> Mark:
        """By the kernel that writes blocks, which is compiled then."""
        return self._sharing.copy(np.array([[source, target, num_bytes, 0]], np.int64))

    def _open(self, channel: Channel, seconds: float) -> tuple[Opened | None, str]:
        """What the other worker lets this one map, or why not."""
        channel.send(Ask(), seconds)
        offered: Offered | No = channel.receive(Offered | No, seconds)
        if isinstance(offered, No):
            return None, offered.reason
        written = secrets.token_bytes(PROBE_BYTES)
        try:
            opened = self._mapper.open(offered.offer)
        except Exception as error:  # also of a kernel that does not compile
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
        except Exception as error:
            opened.close()
            return None, str(error)
        if isinstance(answer, No):
            opened.close()
            return None, answer.reason
        return opened, ""


class Way(Stream):
    """To one worker, over one connection. `opened` is what is mapped of its memory, if anything is.

    Any thread may call `write`; the connection's own thread calls the rest.
    """

    def __init__(self, sharing: Sharing, connection: socket.socket, opened: Opened | None) -> None:
        self._sharing = sharing
        self._connection = connection
        self._opened = opened
        self._lock = threading.Lock()
        self._left = False
        self._marks: dict[SideQueue, Mark] = {}  # behind the newest write of each queue
        self.maps = opened is not None

    def writes(self, ready: Ready) -> bool:
        return self.maps and ready.session == DIRECT

    def leave(self) -> None:
        """Waits for what is being written: the other side does not hear of the end before."""
        with self._lock:
            self._left = True
        for mark in self._marks.values():
            with suppress(Exception):  # of the device, on which nothing is written any more then
                mark.wait()
        if self._opened is not None:
            self._opened.close()

    def write(self, runs: Sequence[Run], caches: Sequence[Tensor], queue: SideQueue) -> Batch | None:
        with self._lock:
            # what was promised is kept for this side until it hangs up as well, but is worth nothing
            if self._left or _has_ended(self._connection):
                return None
            batch = Batch(runs)
            try:
                table = self._table(runs, caches)
            except (ValueError, IndexError) as error:
                batch.error = error
                return batch
            queue.run(partial(self._launch, table, batch))
            batch.mark = self._marks[queue] = queue.mark()
            return batch

    def _launch(self, table: np.ndarray, batch: Batch) -> None:
        try:
            batch.seconds = self._sharing.launch(table)
        except Exception as error:
            batch.error = error

    def _table(self, runs: Sequence[Run], caches: Sequence[Tensor]) -> np.ndarray:
        """As `Sharing.launch` takes it: a row for each block. Raises for runs that have no place at the other side."""
        if self._opened is None:
            raise ValueError("nothing is mapped")
        counts = np.array([len(run.blocks) for run in runs])
        widths = np.array([run.width for run in runs])
        theirs = np.array([_address(run) + run.start * run.width for run in runs], np.int64)
        targets = self._opened.addresses(theirs, counts * widths)
        bases = np.array([caches[run.layer].data_ptr() for run in runs], np.int64)
        strides = np.array([caches[run.layer].stride(0) for run in runs])
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a block in its run
        table = np.zeros((len(number), 4), np.int64)
        table[:, 0] = np.repeat(bases, counts) + np.concatenate([run.blocks for run in runs]) * np.repeat(
            strides, counts
        )
        table[:, 1] = np.repeat(targets, counts) + number * np.repeat(widths, counts)
        table[:, 2] = np.repeat(widths, counts)
        return table


def _address(run: Run) -> int:
    """Where the other side wants the blocks of a layer."""
    ready = run.parcel.ready
    if ready is None or run.layer >= len(ready.addresses):
        raise ValueError("it names no memory for a layer")
    return ready.addresses[run.layer]


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side says nothing more, whatever it has said before."""
    watch = select.poll()
    watch.register(connection, select.POLLRDHUP)
    return bool(watch.poll(0))
