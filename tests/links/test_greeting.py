"""Who is let in by a listener, from a thread and from an event loop, and what strangers get."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from frame.core.processes.channel import AsyncChannel
from frame.links.door import Door
from frame.links.greeting import Listener, RefusedError, connect, connect_async, send_json

KEY = b"a key of these tests"


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, KEY)
    yield listener
    listener.close()


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_of_a_stranger_let_it_in(listener: Listener, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        nonce = stranger.recv(32)
        assert len(nonce) == 32
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b"", "nothing but the nonce is said to a stranger"
    assert listener.next(0) is None


def test_a_proof_of_one_connection_is_worth_nothing_on_another(listener: Listener) -> None:
    """A stranger passes on what the listener sends to one who knows the key, on another connection, and fails."""
    with socket.create_server(("127.0.0.1", 0)) as trap, socket.create_connection(("127.0.0.1", listener.port)) as spy:
        spy.recv(32)
        old = bytes(32)
        port = trap.getsockname()[1]

        def caught() -> None:
            with pytest.raises(RefusedError):
                connect("127.0.0.1", port, KEY, {"node": 1})

        victim = threading.Thread(target=caught)
        victim.start()
        with trap.accept()[0] as caught_one:
            caught_one.sendall(old)
            answer = caught_one.recv(64, socket.MSG_WAITALL)
        victim.join()
        spy.sendall(answer)
        spy.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert spy.recv(100) == b""
    assert listener.next(0) is None


async def test_an_event_loop_connects_as_a_thread_does(listener: Listener) -> None:
    with await connect_async("127.0.0.1", listener.port, KEY, {"node": 1}) as ours:
        found = await asyncio.to_thread(listener.next, 5)
        assert found is not None
        theirs, said = found
        with theirs:
            assert said == {"node": 1}
            assert not ours.getblocking()
    with pytest.raises(RefusedError, match="has another key, or is no engine of frame"):
        await connect_async("127.0.0.1", listener.port, b"another", {"node": 1})


async def test_who_listens_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.links.greeting.GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        await connect_async("127.0.0.1", silent.getsockname()[1], KEY, {})


async def test_a_door_lets_in_who_means_its_engine() -> None:
    door = Door("tcp://127.0.0.1/engine-a", KEY)
    try:
        other = await AsyncChannel.connect(door.address.replace("engine-a", "engine-b"), int, KEY)
        right = await AsyncChannel.connect(door.address, int, KEY)
        connection, _ = await asyncio.to_thread(door.accept)
        with connection:
            assert await other.receive() is None, "it is of an engine that had this port before"
            send_json(connection, 7)  # a frame: four bytes of length, and what is also msgpack
            assert await right.receive() == 55
        other.close()
        right.close()
    finally:
        door.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionAbortedError):
        door.accept()
    door.close()


def test_a_machine_with_another_key_is_named_once_at_the_listener(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener("127.0.0.1", 0, KEY)
    try:
        for _ in range(2):
            with pytest.raises(RefusedError, match="has another key"):
                connect("127.0.0.1", listener.port, b"another key", {})
        said = [record.getMessage() for record in caplog.records]
        assert said == ["whoever connects from 127.0.0.1 is refused: it has another key, or is no machine of frame"]
    finally:
        listener.close()


def test_an_own_address_that_is_none_is_named(listener: Listener) -> None:
    said = r"the own address 192\.0\.2\.1 is none of this machine's"
    with pytest.raises(RefusedError, match=said):
        connect("127.0.0.1", listener.port, KEY, {}, own="192.0.2.1")
    with pytest.raises(RefusedError, match=said):
        asyncio.run(connect_async("127.0.0.1", listener.port, KEY, {}, own="192.0.2.1"))
