"""Length-prefixed msgpack frames over Unix sockets, for threads and for asyncio.

A frame is 4 bytes of length (big-endian) and one message. A peer that sends a frame above the limit or an unexpected
message is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

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
            if select.select([self._socket], [self._socket], [])[0]:
                read()
                continue
            with contextlib.suppress(BlockingIOError):
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]

    def receive(self) -> Any:
        """The next message, None at the end. Raises `ValueError` for an invalid one, `OSError` for a broken socket."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > self._limit:
            raise FrameTooLargeError(f"a peer announced {length} bytes; the channel's limit is {self._limit}")
        data = self._read(length)
        return None if data is None else decode(bytes(data), self._kind)

    def readable(self, seconds: float = 0) -> bool:
        """Whether a message or the end begins to arrive within `seconds`, so that `receive` would return soon."""
        return bool(select.select([self._socket], [], [], max(0, seconds))[0])

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


class AsyncChannel(asyncio.Protocol):
    """The same on an event loop. What had arrived is still read after the end, unless a `send` found the end."""

    def __init__(self, kind: Any, limit: int = MAX_FRAME_BYTES) -> None:
        self._kind = kind
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._rest = bytearray()  # the beginning of the next frame
        self._ended = False
        self._error: Exception | None = None  # why it ended, unless the peer hung up
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._paused = False

    @classmethod
    async def connect(cls, address: str, kind: Any) -> AsyncChannel:
        """Connects to a `listen`er; raises `OSError` when there is none, or when it belongs to another user."""
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
        """Takes over a connected Unix socket."""
        _, channel = await asyncio.get_running_loop().create_unix_connection(lambda: cls(kind, limit), sock=connection)
        return channel

    async def send(self, message: Any) -> None:
        """Waits while the peer is slow; raises `OSError` when it is gone."""
        data = pack(message, self._limit)
        if not self._ended:
            self._transport.write(data)
            await self._writable.wait()
        if self._ended:
            raise ConnectionResetError(errno.ECONNRESET, "the peer is gone")

    async def receive(self) -> Any:
        """Like `Channel.receive`."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._frames.popleft()
        self._num_waiting_bytes -= len(frame)
        if self._paused and not self._frames:
            self._paused = False
            self._transport.resume_reading()
        return decode(frame, self._kind)

    def close(self) -> None:
        """Ends the conversation."""
        self._end(None)
        self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop, like the methods below."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Splits the data into frames; pauses reading while many wait."""
        self._rest += data
        start = 0
        while len(self._rest) >= (begin := start + _LENGTH.size):
            (length,) = _LENGTH.unpack_from(self._rest, start)
            if length > self._limit:
                text = f"a peer announced {length} bytes; the channel's limit is {self._limit}"
                self._end(FrameTooLargeError(text))
                self._transport.close()
                break
            if len(self._rest) < begin + length:
                break
            start = begin + length
            with memoryview(self._rest) as view:
                self._frames.append(bytes(view[begin:start]))
            self._num_waiting_bytes += length
        del self._rest[:start]
        if self._num_waiting_bytes > _MAX_WAITING_BYTES and not self._ended:
            self._paused = True
            self._transport.pause_reading()
        self._arrived.set()

    def pause_writing(self) -> None:
        """The peer is slow."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._writable.set()

    def eof_received(self) -> None:
        """The peer hung up."""
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._end(exc)

    def _end(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            self._error = error
        self._arrived.set()
        self._writable.set()
