from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
import threading

import msgspec
import numpy as np
import pytest

from frame.core.processes.channel import AsyncChannel, Channel, FrameTooLargeError, listen, pack, same_user
from frame.core.processes.messages import Abort, Add, FromEngine, Outputs, ToEngine
from frame.interfaces import EngineOutput, EngineRequest, SamplingParams


def test_messages_survive_the_trip() -> None:
    left, right = socket.socketpair()
    sender, receiver = Channel(left, FromEngine), Channel(right, ToEngine)
    request = EngineRequest(
        request_id="a", prompt_ids=np.arange(5, dtype=np.int32), params=SamplingParams(stop="x"), max_tokens=3, seed=1
    )
    sender.send(Add(request))
    sender.send(Abort(["a", "b"]))
    added, aborted = receiver.receive(), receiver.receive()
    assert added.request.prompt_ids.tolist() == [0, 1, 2, 3, 4]
    assert added.request.params == request.params
    assert aborted == Abort(["a", "b"])
    sender.close()
    assert receiver.receive() is None
    receiver.close()


@pytest.mark.parametrize("data", [pickle.dumps({"a": 1}), b"\xc1", b"\x81\xa4type\xa4Evil", b""])
def test_anything_else_is_refused(data: bytes) -> None:
    left, right = socket.socketpair()
    receiver = Channel(right, ToEngine)
    left.sendall(struct.pack(">I", len(data)) + data)
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        receiver.receive()
    left.close()
    receiver.close()


def test_size_limit_holds_on_both_ends() -> None:
    left, right = socket.socketpair()
    receiver = Channel(right, ToEngine, limit=64)
    with pytest.raises(FrameTooLargeError):
        pack(Abort(["x" * 100]), limit=64)
    left.sendall(struct.pack(">I", 65))
    with pytest.raises(FrameTooLargeError, match="65 bytes"):
        receiver.receive()
    left.close()
    receiver.close()


async def test_a_name_in_no_folder_is_found_and_gone_with_its_listener() -> None:
    address = f"@frame-test-{os.getpid()}"
    listener = listen(address)
    channel = await AsyncChannel.connect(address, FromEngine)
    accepted, _ = listener.accept()
    assert same_user(accepted)
    channel.close()
    accepted.close()
    listener.close()
    with pytest.raises(OSError, match="refused"):
        await AsyncChannel.connect(address, FromEngine)


async def test_nothing_is_said_to_what_another_user_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"@frame-other-{os.getpid()}"
    listener = listen(address)
    monkeypatch.setattr("frame.core.processes.channel.same_user", lambda connection: False)
    with pytest.raises(PermissionError, match="another user"):
        await AsyncChannel.connect(address, FromEngine)
    listener.close()


async def test_asyncio_side() -> None:
    left, right = socket.socketpair()
    remote = Channel(left, ToEngine)
    channel = await AsyncChannel.wrap(right, FromEngine)
    outputs = [EngineOutput(request_id="a", token_ids=list(range(1000))) for _ in range(300)]
    thread = threading.Thread(target=lambda: remote.send(Outputs(outputs)))
    thread.start()
    assert (await channel.receive()).outputs == outputs
    await channel.send(Abort(["a"]))
    assert await asyncio.to_thread(remote.receive) == Abort(["a"])
    remote.close()
    assert await channel.receive() is None
    channel.close()
    thread.join()


async def test_what_was_said_before_a_socket_broke_is_read_first() -> None:
    left, right = socket.socketpair()
    channel = await AsyncChannel.wrap(right, FromEngine)
    await channel.send(Abort(["unread"]))  # closing with something unread resets the connection
    reply = Outputs([EngineOutput(request_id="a", token_ids=[1])])
    left.sendall(pack(reply) + pack(reply)[:3])
    left.close()
    await asyncio.sleep(0.05)
    assert await channel.receive() == reply
    with contextlib.suppress(ConnectionResetError):  # either is the end
        assert await channel.receive() is None
    with pytest.raises(OSError, match="the peer is gone"):
        await channel.send(Abort(["late"]))
    channel.close()


async def test_closing_wakes_who_sends_to_a_slow_peer_and_who_receives() -> None:
    left, right = socket.socketpair()
    channel = await AsyncChannel.wrap(right, FromEngine)
    sending = asyncio.ensure_future(
        channel.send(Outputs([EngineOutput(request_id="a", token_ids=list(range(100_000)))] * 20))
    )
    receiving = asyncio.ensure_future(channel.receive())
    await asyncio.sleep(0.05)
    assert not sending.done()
    channel.close()
    async with asyncio.timeout(60):
        assert await receiving is None
        with pytest.raises(ConnectionError):
            await sending
    left.close()


async def test_frames_arrive_whole_however_they_are_cut_and_many_make_the_peer_wait() -> None:
    left, right = socket.socketpair()
    channel = await AsyncChannel.wrap(right, FromEngine)
    messages = [Outputs([EngineOutput(request_id=str(n), token_ids=list(range(n % 1000)))]) for n in range(5000)]
    data = b"".join(pack(message) for message in messages)

    def send() -> None:
        for start in range(0, len(data), 7919):
            left.sendall(data[start : start + 7919])
        left.close()

    thread = threading.Thread(target=send)
    thread.start()
    while not channel._reader._paused:
        await asyncio.sleep(0.01)
    assert len(data) > 5 << 20
    assert len(channel._reader._buffer) < 1 << 20  # nobody has read yet, so the rest waits with the sender
    assert thread.is_alive()
    assert [await channel.receive() for _ in messages] == messages
    assert await channel.receive() is None
    assert await channel.receive() is None
    thread.join()
    channel.close()


async def test_the_asyncio_side_keeps_what_came_before_a_frame_too_large() -> None:
    left, right = socket.socketpair()
    channel = await AsyncChannel.wrap(right, FromEngine, limit=64)
    good = Outputs([EngineOutput(request_id="a", token_ids=[1])])
    left.sendall(pack(good) + struct.pack(">I", 65))
    assert await channel.receive() == good
    for _ in range(2):
        with pytest.raises(FrameTooLargeError, match="65 bytes"):
            await channel.receive()
    channel.close()
    left.close()
