"""Length-prefixed msgpack frames over Unix sockets and TCP, for threads and for asyncio.

A frame is 4 bytes of length (big-endian) and one message. A peer that sends a frame above the limit or an unexpected
message is disconnected. Peers of other machines have proven that they know a key before the first frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from frame.links.greeting import connect_async
from frame.links.polling import wait_for

from ..interfaces.wire import decode, encode

#: Largest frame that is sent or accepted.
MAX_FRAME_BYTES = 1 << 28
_LENGTH = struct.Struct(">I")
_PEER = struct.Struct("3i")
#: Bytes of complete frames that may wait for a reader on an event loop; above them, nothing more is read from the peer.
_MAX_WAITING_BYTES = 1 << 17


class FrameTooLargeError(ValueError):
    """A message exceeds the size limit of the channel."""


def listen(address: str) -> socket.socket:
    """A listening Unix socket at `address`.

    "@name" is an abstract address, which no folder holds and which ends with its listener. Any local user can connect
    to it, so both sides check the other's user (`same_user`).
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_native(address))
    listener.listen(16)
    return listener


def _native(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address


def same_user(connection: socket.socket) -> bool:
    """Whether the peer runs as this user (or as root)."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid in (os.getuid(), 0)


def pack(message: Any, limit: int = MAX_FRAME_BYTES) -> bytes:
    """A message as a frame; raises `FrameTooLargeError`."""
    data = encode(message)
    if len(data) > limit:
        raise FrameTooLargeError(f"a message of {len(data)} bytes exceeds the channel's limit of {limit}")
    return _LENGTH.pack(len(data)) + data


class Channel:
    """A socket that carries frames, for blocking threads: one may read while another writes.

    `kind` is the union of messages that may arrive.
    """

    def __init__(self, connection: socket.socket, kind: Any, limit: int = MAX_FRAME_BYTES) -> None:
        self._socket = connection
        self._kind = kind
        self._limit = limit

    def send(self, message: Any, read: Callable[[], None] | None = None) -> None:
        """Blocks until all of it is handed over; raises `OSError` when the peer is gone.

        `read` is called whenever something arrives meanwhile, since two peers that only send would wait for each other
        for ever.
        """
        rest = memoryview(pack(message, self._limit))
        if read is None:
            self._socket.sendall(rest)
            return
        while rest:
            if wait_for([self._socket], [self._socket])[0]:
                read()
                continue
            with contextlib.suppress(BlockingIOError):
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]

    def send_part(self, frame: memoryview) -> int:
        """Hands over what the peer takes at once of a `pack`ed frame; returns the number of bytes."""
        return self._socket.send(frame, socket.MSG_DONTWAIT)

    def send_descriptors(self, descriptors: Sequence[int]) -> None:
        """Gives the peer copies of open files, which it takes by `receive_descriptors` before its next message."""
        socket.send_fds(self._socket, [b"\0"], descriptors)

    def receive_descriptors(self, count: int) -> list[int]:
        """The files of the peer's `send_descriptors`, which are this process's to close; raises `OSError` without.

        Programs that this process starts do not get them.
        """
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, count)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if len(descriptors) != count:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ConnectionError(errno.EPROTO, f"the peer sent {len(descriptors)} open files instead of {count}")
        return list(descriptors)

    def receive(self) -> Any:
        """The next message, None at the end. Raises `ValueError` for an invalid one, `OSError` for a broken socket."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        _check_announced(length, self._limit)
        data = self._read(length)
        return None if data is None else decode(bytes(data), self._kind)

    def fileno(self) -> int:
        """The socket's descriptor; -1 once closed."""
        return self._socket.fileno()

    def readable(self, seconds: float = 0) -> bool:
        """Whether a message or the end begins to arrive within `seconds`, so that `receive` would return soon."""
        return bool(wait_for([self._socket], seconds=seconds)[0])

    def close(self) -> None:
        """Ends the conversation; the peer and a thread that reads here see the end."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                return None
            view = view[count:]
        return data


def send_to_all(
    channels: Sequence[Channel], frame: bytes, read: Callable[[int], None], timeout: float | None = None
) -> None:
    """Sends one `pack`ed frame over every channel, each as quickly as its peer takes it.

    `read(i)` is called whenever something arrives from peer i meanwhile, as in `Channel.send`, and when it is gone.
    Raises `TimeoutError` with the peers that have not taken all of it after `timeout` seconds.
    """
    rests = {index: memoryview(frame) for index in range(len(channels))}
    latest = None if timeout is None else time.monotonic() + timeout
    while rests:
        left = None if latest is None else max(0.0, latest - time.monotonic())
        readable, writable = wait_for(channels, [channels[index] for index in rests], left)
        for index, channel in enumerate(channels):
            if channel in readable:
                read(index)
            elif channel in writable:
                with contextlib.suppress(BlockingIOError):
                    rests[index] = rests[index][channel.send_part(rests[index]) :]
                if not rests[index]:
                    del rests[index]
        if rests and left == 0.0:
            raise TimeoutError(f"peers {sorted(rests)} of {len(channels)} did not take a message in {timeout:g} s")


class _Reader(asyncio.StreamReader):
    """Lets everything that arrived before the connection broke be read; asyncio's reader raises the error first."""

    broken: Exception | None = None

    def set_exception(self, exc: Exception) -> None:
        self.broken = exc
        self.feed_eof()


class AsyncChannel:
    """A socket that carries frames, for an event loop. What had arrived is still read after the connection ended."""

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter, kind: Any, limit: int) -> None:
        self._reader = reader
        self._writer = writer
        self._kind = kind
        self._limit = limit
        self._length: int | None = None  # of a frame whose rest is still to be read

    @classmethod
    async def connect(cls, address: str, kind: Any, key: bytes = b"") -> AsyncChannel:
        """Connects to a `listen`er, or to a `Door` by `key`.

        Raises `OSError` when there is none, or when it belongs to another user, `ValueError` when it has another key.
        """
        if address.startswith("tcp://"):
            where = urlsplit(address)
            said = {"engine": where.path}
            return await cls.wrap(await connect_async(where.hostname or "", where.port or 0, key, said), kind)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, _native(address))
            if not same_user(connection):
                raise PermissionError(errno.EPERM, "another user listens there")
        except BaseException:
            connection.close()
            raise
        return await cls.wrap(connection, kind)

    @classmethod
    async def wrap(cls, connection: socket.socket, kind: Any, limit: int = MAX_FRAME_BYTES) -> AsyncChannel:
        """Takes over a connected socket."""
        loop = asyncio.get_running_loop()
        reader = _Reader(_MAX_WAITING_BYTES // 2, loop)  # asyncio stops reading from the peer at twice this limit
        protocol = asyncio.StreamReaderProtocol(reader)
        make: Any = loop.create_unix_connection if connection.family == socket.AF_UNIX else loop.create_connection
        transport, _ = await make(lambda: protocol, sock=connection)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), kind, limit)

    async def send(self, *messages: Any) -> None:
        """Sends messages with no other between; then waits while the peer is slow. Raises `OSError` once it is gone."""
        data = b"".join(pack(message, self._limit) for message in messages)
        if not self._writer.is_closing():
            self._writer.write(data)
            await self._writer.drain()
        if self._writer.is_closing():  # perhaps since `drain` began to wait
            raise ConnectionResetError(errno.ECONNRESET, "the peer is gone")

    async def receive(self) -> Any:
        """Like `Channel.receive`."""
        try:
            if self._length is None:
                (self._length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            _check_announced(self._length, self._limit)
            frame = await self._reader.readexactly(self._length)
        except (asyncio.IncompleteReadError, FrameTooLargeError) as error:
            self._writer.close()
            if isinstance(error, FrameTooLargeError):
                raise
            if self._reader.broken is not None:
                raise self._reader.broken from None
            return None
        self._length = None
        return decode(frame, self._kind)

    def close(self) -> None:
        """Ends the conversation: a waiting `receive` returns None, a `send` that waits for a slow peer raises."""
        self._reader.feed_eof()
        transport = self._writer.transport
        if transport.get_write_buffer_size() > transport.get_write_buffer_limits()[1]:
            transport.abort()  # a transport that closes would flush first, for as long as the peer does not read
        else:
            transport.close()


def _check_announced(length: int, limit: int) -> None:
    if length > limit:
        raise FrameTooLargeError(f"a peer announced {length} bytes; the channel's limit is {limit}")
