"""Length-prefixed msgpack frames over Unix sockets, for threads and for asyncio.

A frame is 4 bytes of length (big-endian) and one message. A peer that sends more than the limit, or anything that is
not one of the expected messages, is cut off. Knows no message's meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

from .interfaces.wire import decode, encode

#: Largest frame that is sent or accepted.
MAX_FRAME_BYTES = 1 << 28
_LENGTH = struct.Struct(">I")
_PEER = struct.Struct("3i")


class FrameTooLargeError(ValueError):
    """A message exceeds the size limit of the channel."""


def listen(address: str) -> socket.socket:
    """A listening Unix socket at `address`: "@name" is in no folder and gone with its listener.

    Any local user may find such a name, so both sides ask who the other is (`same_user`).
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

        `read` is called whenever something arrives meanwhile: peers that both only send would wait for ever.
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
        """The next message, None at the end. Raises `ValueError` for what is none, `OSError` for a broken socket."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > self._limit:
            raise FrameTooLargeError(f"a peer announced {length} bytes; the channel's limit is {self._limit}")
        data = self._read(length)
        return None if data is None else decode(bytes(data), self._kind)

    def readable(self) -> bool:
        """Whether a message (or the end) has begun to arrive, so that `receive` would not wait for the peer."""
        return bool(select.select([self._socket], [], [], 0)[0])

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


class AsyncChannel:
    """The same over asyncio streams."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any, limit: int = MAX_FRAME_BYTES
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._kind = kind
        self._limit = limit

    @classmethod
    async def connect(cls, address: str, kind: Any) -> AsyncChannel:
        """Connects to what `listen`s there; raises `OSError` when nobody does, or somebody else."""
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
    async def wrap(cls, connection: socket.socket, kind: Any) -> AsyncChannel:
        """Takes over a connected Unix socket."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return cls(reader, writer, kind)

    async def send(self, message: Any) -> None:
        """Waits while the peer is slow; raises `OSError` when it is gone."""
        self._writer.write(pack(message, self._limit))
        await self._writer.drain()

    async def receive(self) -> Any:
        """As `Channel.receive`."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > self._limit:
                raise FrameTooLargeError(f"a peer announced {length} bytes; the channel's limit is {self._limit}")
            return decode(await self._reader.readexactly(length), self._kind)
        except asyncio.IncompleteReadError:
            return None

    def close(self) -> None:
        """Ends the conversation."""
        self._writer.close()
