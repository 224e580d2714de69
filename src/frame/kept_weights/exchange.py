"""One question of a worker to the keeper of its weights. Imports no torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import closing

from frame.core.processes.channel import Channel, same_user

from .messages import FILES_AT_ONCE, MAX_BYTES, MAX_PIECES, Kept, ToKeeper

#: Seconds for an answer: other workers ask before this one.
_PATIENCE_SECONDS = 60.0


def send_files(channel: Channel, files: Sequence[int]) -> None:
    """Gives the peer copies of open files, of any number, each lot when it has taken the one before."""
    for first in range(0, len(files), FILES_AT_ONCE):
        channel.send_descriptors(files[first : first + FILES_AT_ONCE])


def receive_files(channel: Channel, count: int) -> list[int]:
    """The files of `send_files`, which are the caller's to close; raises `OSError` where not all of them come."""
    if count > MAX_PIECES:
        raise ValueError(f"weights in {count} pieces; at most {MAX_PIECES} are kept")
    files: list[int] = []
    try:
        while len(files) < count:
            files += channel.receive_descriptors(min(FILES_AT_ONCE, count - len(files)))
    except BaseException:
        for file in files:
            os.close(file)
        raise
    return files


def _connect(connection: socket.socket, address: str) -> None:
    latest = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            connection.connect(f"\0{address[1:]}")
            return
        except ConnectionRefusedError:
            raise ConnectionRefusedError("nobody on this machine keeps them") from None
        except BlockingIOError:  # as many as may wait for the keeper do
            if time.monotonic() > latest:
                raise TimeoutError("too many wait for the keeper of weights") from None
            time.sleep(0.01)


def ask(address: str, question: ToKeeper, files: Sequence[int] = ()) -> tuple[Kept, list[int]]:
    """What the keeper at `address` answers, and the files that come with it; raises `OSError` or `ValueError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closing(Channel(connection, Kept, MAX_BYTES)) as channel:
        connection.settimeout(_PATIENCE_SECONDS)
        _connect(connection, address)
        if not same_user(connection):
            raise PermissionError("another user listens there")
        channel.send(question)
        send_files(channel, files)
        answer = channel.receive()
        if answer is None:
            raise ConnectionError("the keeper of weights hung up")
        return answer, receive_files(channel, len(answer.sizes))
