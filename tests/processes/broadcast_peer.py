"""The other side of a broadcast, in a process of its own: `python broadcast_peer.py ROLE DESCRIPTOR [NUMBER]`.

A reader answers on its socket: with the number of messages, and whether all were right, when the writer ends.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import msgspec
import numpy as np

from frame.core.interfaces.wire import Borrowed
from frame.core.processes.broadcast import BroadcastReader, BroadcastWriter, RingShape
from frame.core.processes.channel import Channel


class Number(msgspec.Struct, tag=True):
    """A message with its place in the order, and bytes that follow from it."""

    value: int
    array: np.ndarray
    borrowed: Borrowed


class Hello(msgspec.Struct, tag=True):
    """Writer to reader, by socket: attach to a ring whose files follow."""

    shape: RingShape
    reader: int


class Seen(msgspec.Struct, tag=True):
    """Reader to writer: what it has read so far."""

    count: int
    wrong: int


Any_ = Number | Hello | Seen


def number(value: int, size: int = 4) -> Number:
    """Message `value` with an array of `size` entries."""
    array = np.arange(value, value + size, dtype=np.int32)
    return Number(value, array, Borrowed(array.tobytes()))


def is_right(message: Number, value: int) -> bool:
    """Whether it is `number(value, …)`."""
    expected = np.arange(value, value + len(message.array), dtype=np.int32)
    return (
        message.value == value
        and bool((message.array == expected).all())
        and bytes(message.borrowed.data) == expected.tobytes()
    )


def attach(channel: Channel) -> BroadcastReader:
    """The ring of a writer that says `Hello`."""
    hello = channel.receive()
    return BroadcastReader(hello.shape, hello.reader, channel.receive_descriptors(2), channel, Any_)


def invite(writer: BroadcastWriter, channel: Channel, reader: int) -> None:
    """Gives the files of a ring to a reader that calls `attach`."""
    channel.send(Hello(writer.shape, reader))
    channel.send_descriptors(writer.descriptors(reader))


def _read(channel: Channel, role: str) -> None:
    reader = attach(channel)
    seen = Seen(0, 0)
    channel.send(seen)

    def consume(message: Any) -> None:
        seen.wrong += not is_right(message, seen.count)
        seen.count += 1
        if role == "slow":
            time.sleep(0.02)
        elif role == "stuck":
            time.sleep(3600)
        elif role == "echo":
            channel.send(seen)

    while reader.read(consume):
        pass
    reader.close()


def _write(channel: Channel, count: int) -> None:
    writer = BroadcastWriter(RingShape(1, num_chunks=4, chunk_bytes=4096))
    invite(writer, channel, 0)
    for value in range(count):
        writer.write(number(value), [channel])
    channel.send(Seen(count, 0))  # which the reader must not take for a message of the ring
    time.sleep(3600)


if __name__ == "__main__":
    peer = Channel(socket.socket(fileno=int(sys.argv[2])), Any_)
    if sys.argv[1] == "write":
        _write(peer, int(sys.argv[3]))
    else:
        _read(peer, sys.argv[1])
