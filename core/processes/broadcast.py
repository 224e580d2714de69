"""Broadcast through shared memory: one writer, N readers of one host, and every reader gets every message in order.

The memory is anonymous and is handed over as an open file, so that it ends with the last process that maps it, however
that ends. It holds `num_chunks` chunks of data, used in turn, and then for each chunk 1 + N flag bytes: "written", and
one for each reader that has finished with the chunk. Last come N bytes that say which readers sleep.

    0???  writable       1000  freshly written       1011  partially read       1111  fully read, thus writable

The writer waits until a chunk is writable, clears "written", fills the chunk, zeroes the readers' flags, and sets
"written" last. A reader takes a chunk whose "written" is 1 and whose own flag is 0, and sets its flag when its consumer
has finished, also when that raised. A message that is larger than a chunk leaves a mark in the chunk and follows over
the reader's socket, which carries nothing else to it; the end of the socket is the end of the writer.

A reader looks on for as long as messages have lately come, unless others want its processor (`lookout.Lookout`). Then
it sleeps in `poll` on its socket and an eventfd, which the writer rings for sleepers alone. No wake-up is lost: the
reader resets the eventfd, says that it sleeps, and looks once more; the writer looks for sleepers after the message is
there, and the fence keeps either order.

Memory order. Both sides call the fence between touching flags and touching data: the data is complete before a reader's
flag is zeroed, and read before it is set. On x86 stores stay in order and so do loads; ARM keeps neither, and the fence
does on both (see `make_fence`). A reader looks at the flags, calls the fence, and looks again. Its own flag zeroed says
that the data is complete. But its first look may have found "written" as the chunk's previous use left it, while the
writer is still zeroing, perhaps in overlapping stores; the second look finds "written" cleared then. A flag is one
byte, so that it is never half written.

Knows no step and no worker.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from frame.links.lookout import Lookout

from ..interfaces.wire import decoder_apart, encode, encoder_apart
from .channel import Channel, pack, send_to_all
from .shared_memory import make_fence, make_memory

#: Number of the message, where in the chunk its msgpack begins, and how long it is (`_OVERFLOW`: it comes by socket).
_HEADER = struct.Struct("<QII")
_OVERFLOW = 0xFFFFFFFF
#: Data begins at multiples of this, so that copies to and from it run at full speed.
_ALIGNMENT = 64
#: Looks that a writer takes at a full ring without sleeping, and its longest sleep after them.
_EAGER_LOOKS = 50
_LONGEST_SLEEP_SECONDS = 1e-3


class RingShape(msgspec.Struct, frozen=True):
    """The layout of the memory. Only the part of a chunk that a message fills takes physical memory."""

    num_readers: int
    num_chunks: int = 16
    chunk_bytes: int = 1 << 22

    @property
    def flags_per_chunk(self) -> int:
        return 1 + self.num_readers

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * (self.chunk_bytes + self.flags_per_chunk) + self.num_readers


class _ChunkFullError(Exception):
    """A message does not fit in a chunk."""


class _Ring:
    """What both sides have: the mapped memory, which chunk is next, and the fence."""

    def __init__(self, shape: RingShape, memory: int) -> None:
        if min(shape.num_readers, shape.num_chunks) < 1 or not _ALIGNMENT <= shape.chunk_bytes < _OVERFLOW:
            raise ValueError(f"a ring has a reader, a chunk and {_ALIGNMENT} bytes to 4 GiB in each, unlike {shape}")
        self.shape = shape
        self._map = mmap.mmap(memory, shape.num_bytes)
        self._bytes = memoryview(self._map)
        data = shape.num_chunks * shape.chunk_bytes
        self._chunks = [self._bytes[start : start + shape.chunk_bytes] for start in range(0, data, shape.chunk_bytes)]
        self._flags = self._bytes[data : -shape.num_readers]
        self._asleep = self._bytes[-shape.num_readers :]
        self._fence = make_fence()
        self._flags_per_chunk = shape.flags_per_chunk
        self._count = 0  # messages so far
        self._enter_chunk()

    def _enter_chunk(self) -> None:
        index = self._count % self.shape.num_chunks
        self._chunk = self._chunks[index]
        self._written = index * self._flags_per_chunk

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):  # a consumer kept a view; the memory ends with the process then
            for view in (*self._chunks, self._flags, self._asleep, self._bytes):
                view.release()
            self._map.close()


class BroadcastWriter(_Ring):
    """The side that sends; used by one thread at a time."""

    def __init__(self, shape: RingShape) -> None:
        self._memory = make_memory("frame-broadcast", shape.num_bytes)
        self._bells: list[int] = []
        try:
            super().__init__(shape, self._memory)
            for _ in range(shape.num_readers):
                self._bells.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except BaseException:
            for descriptor in (self._memory, *self._bells):
                os.close(descriptor)
            raise
        self._no_flags = bytes(shape.num_readers)
        self._end = 0  # of what is in the chunk
        self._encode = encoder_apart(self._place)

    def descriptors(self, reader: int) -> tuple[int, int]:
        """The open files that reader number `reader` needs: the memory, and what wakes it. The writer's to close."""
        return self._memory, self._bells[reader]

    def write(
        self,
        message: Any,
        channels: Sequence[Channel],
        *,
        check: Callable[[int], None] = lambda reader: None,
        timeout: float | None = None,
        apart: bool = True,
    ) -> None:
        """Gives `message` to all readers, whose sockets are `channels`, encoded once; waits while the ring is full.

        Meanwhile `check(reader)` is called for those that are late: it takes what they have sent, since two sides that
        only send wait for each other for ever, and raises when the reader is dead. Raises `FrameTooLargeError` or
        `TypeError` for what cannot be sent, and `TimeoutError` naming the late readers after `timeout` seconds; nothing
        was sent then, unless the message is larger than a chunk, when the broadcast cannot go on. `apart=False` is for
        messages with arrays in fields of no declared type.
        """
        if self._late():
            self._wait_until_writable(check, timeout)
        self._flags[self._written] = 0
        self._fence()  # the readers have finished with the chunk before it changes
        frame = self._fill(message, apart)
        self._fence()  # the data is there before a flag says so
        self._flags[self._written + 1 : self._written + self._flags_per_chunk] = self._no_flags
        self._fence()
        self._flags[self._written] = 1
        self._count += 1
        self._enter_chunk()
        self._fence()  # the message is there before the look for sleepers
        for reader, bell in enumerate(self._bells):
            if self._asleep[reader]:
                os.eventfd_write(bell, 1)
        if frame is not None:
            send_to_all(channels, frame, check, timeout)

    def close(self) -> None:
        """Closes the memory and the eventfds on this side. May be called twice."""
        bells, self._bells = self._bells, []
        if bells:
            self._unmap()
            for descriptor in (self._memory, *bells):
                os.close(descriptor)

    def _late(self) -> list[int]:
        """The readers that have not finished with the chunk to be written; none where it was never written."""
        written, *finished = self._flags[self._written : self._written + self._flags_per_chunk]
        return [reader for reader, flag in enumerate(finished) if not flag] if written and 0 in finished else []

    def _wait_until_writable(self, check: Callable[[int], None], timeout: float | None) -> None:
        looks = 0
        begin = time.monotonic()
        while late := self._late():
            for reader in late:
                check(reader)
            if timeout is not None and time.monotonic() - begin > timeout:
                message = self._count - self.shape.num_chunks
                raise TimeoutError(
                    f"readers {late} of {self.shape.num_readers} have not finished message {message} of a broadcast "
                    f"for {timeout:g} seconds; all {self.shape.num_chunks} chunks are full"
                )
            looks += 1
            if looks <= _EAGER_LOOKS:
                os.sched_yield()
            else:
                time.sleep(min(_LONGEST_SLEEP_SECONDS, 2e-5 * (looks - _EAGER_LOOKS)))

    def _fill(self, message: Any, apart: bool) -> bytes | None:
        """Puts a message into the chunk; returns the frame that has to follow by socket where it does not fit."""
        self._end = _HEADER.size
        try:
            body = self._encode(message) if apart else encode(message)
            start = self._place(memoryview(body))
        except _ChunkFullError:
            frame = pack(message)
            _HEADER.pack_into(self._chunk, 0, self._count, 0, _OVERFLOW)
            return frame
        _HEADER.pack_into(self._chunk, 0, self._count, start, len(body))
        return None

    def _place(self, data: memoryview) -> int:
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        end = start + len(data)
        if end > self.shape.chunk_bytes:
            raise _ChunkFullError
        self._chunk[start:end] = data
        self._end = end
        return start


class BroadcastReader(_Ring):
    """Reader number `reader` of a ring; used by one thread. It owns the two open files.

    `kind` is the union of messages that may arrive, by the ring or, from a writer that ends them there, by `channel`.
    `spin_seconds` is how long it looks at most for a message without sleeping, after one that came within them.
    """

    def __init__(
        self,
        shape: RingShape,
        reader: int,
        descriptors: Sequence[int],
        channel: Channel,
        kind: Any,
        spin_seconds: float = 0.02,
    ) -> None:
        memory, self._bell = descriptors
        try:
            if not 0 <= reader < shape.num_readers:
                raise ValueError(f"there is no reader {reader} of {shape.num_readers}")
            super().__init__(shape, memory)
        except BaseException:
            os.close(self._bell)
            raise
        finally:
            os.close(memory)
        self._channel = channel
        self._own = 1 + reader
        self._lookout = Lookout(spin_seconds)
        self._decode = decoder_apart(kind, self._find)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._poll.register(channel.fileno(), select.POLLIN)

    def readable(self) -> bool:
        """Whether a message has arrived. The end of the writer does not count, since only `read` tells it."""
        if not self._flags[self._written] or self._flags[self._written + self._own]:
            return False
        self._fence()
        return bool(self._flags[self._written]) and not self._flags[self._written + self._own]

    def read(self, consume: Callable[[Any], None], timeout: float | None = None) -> bool:
        """Waits for a message and gives it to `consume`; False, without that, when the writer is gone.

        `Borrowed` fields may be read until `consume` returns. Raises `TimeoutError` when nothing arrives in `timeout`
        seconds, `ValueError` for a message of another kind, which is skipped, and what `consume` raises; the chunk is
        free in each case.
        """
        if not self._wait(timeout):
            return False
        number, start, length = _HEADER.unpack_from(self._chunk)
        try:
            if number != self._count:
                raise RuntimeError(f"a broadcast has message {number} in the place of {self._count}")
            message = self._channel.receive() if length == _OVERFLOW else self._decode(self._find(start, length))
            if message is not None:
                consume(message)
            return message is not None
        finally:
            self._fence()  # the data is read before the flag says so
            self._flags[self._written + self._own] = 1
            self._count += 1
            self._enter_chunk()

    def close(self) -> None:
        """Unmaps the memory; the channel stays open. May be called twice."""
        if self._bell >= 0:
            self._unmap()
            os.close(self._bell)
            self._bell = -1

    def _find(self, start: int, length: int) -> memoryview:
        if start < 0 or length < 0 or start + length > self.shape.chunk_bytes:
            raise ValueError(f"a broadcast names {length} bytes at {start} of a chunk of {self.shape.chunk_bytes}")
        return self._chunk[start : start + length].toreadonly()

    def _wait(self, timeout: float | None) -> bool:
        """True once a message is there, False once nothing can come any more."""
        if self.readable():
            return True
        begin = time.monotonic()
        try:
            found = self._lookout.look(self.readable, float("inf") if timeout is None else timeout)
            return found or self._sleep(begin, timeout)
        finally:
            self._asleep[self._own - 1] = 0
            self._lookout.waited(time.monotonic() - begin)

    def _sleep(self, begin: float, timeout: float | None) -> bool:
        """As `_wait`, which began at `begin`."""
        while True:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            self._asleep[self._own - 1] = 1
            self._fence()  # the writer knows of the sleep before the last look
            if self.readable():
                return True
            left = None if timeout is None else begin + timeout - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"the writer of a broadcast sent no message {self._count} for {timeout:g} seconds")
            ready = self._poll.poll(None if left is None else 1000 * left)
            if any(descriptor != self._bell for descriptor, _ in ready) and not self.readable():
                return False
