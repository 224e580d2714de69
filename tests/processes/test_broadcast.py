"""Every reader gets every message once and in order, whatever its size, and each side hears of the other's end."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from frame.core.interfaces.wire import APART_BYTES, Borrowed
from frame.core.processes.broadcast import BroadcastReader, BroadcastWriter, RingShape
from frame.core.processes.channel import Channel, FrameTooLargeError
from frame.links.lookout import Lookout

from .broadcast_peer import Any_, Number, Seen, attach, invite, is_right, number

PEER = Path(__file__).with_name("broadcast_peer.py")


@dataclass
class Pair:
    """A writer and its readers, here; `channels` lead to the readers."""

    writer: BroadcastWriter
    channels: list[Channel]
    readers: list[BroadcastReader]

    def write(self, value: int, size: int = 4) -> None:
        self.writer.write(number(value, size), self.channels)

    def read(self, reader: int = 0, timeout: float = 60) -> Number:
        got = []
        assert self.readers[reader].read(
            lambda message: got.append((message, is_right(message, message.value))), timeout
        )
        assert got[0][1]
        return got[0][0]


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    with contextlib.ExitStack() as stack:

        def pair(num_readers: int = 2, num_chunks: int = 3, chunk_bytes: int = 4096) -> Pair:
            shape = RingShape(num_readers, num_chunks, chunk_bytes)
            made = Pair(BroadcastWriter(shape), [], [])
            stack.callback(made.writer.close)
            for index in range(num_readers):
                ours, theirs = (Channel(one, Any_) for one in socket.socketpair())
                made.channels.append(ours)
                invite(made.writer, ours, index)
                made.readers.append(attach(theirs))
                for closing in (theirs.close, ours.close, made.readers[-1].close):
                    stack.callback(closing)
            return made

        yield pair


@dataclass
class Others:
    """A writer here and readers in processes of their own."""

    writer: BroadcastWriter
    processes: list[subprocess.Popen[bytes]]
    channels: list[Channel]

    def write(self, value: int, size: int = 4, timeout: float | None = 60) -> None:
        self.writer.write(number(value, size), self.channels, check=self.check, timeout=timeout)

    def check(self, reader: int) -> None:
        try:
            dead = self.channels[reader].readable() and self.channels[reader].receive() is None
        except ConnectionResetError:  # it had not read everything
            dead = True
        if dead:
            raise RuntimeError(f"reader {reader} is dead")


def _start(*arguments: object) -> tuple[subprocess.Popen[bytes], Channel]:
    ours, theirs = socket.socketpair()
    with theirs:
        role, *rest = (str(argument) for argument in arguments)
        command = [sys.executable, "-m", "tests.processes.broadcast_peer", role, str(theirs.fileno()), *rest]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=PEER.parents[2])
    return process, Channel(ours, Any_)


@pytest.fixture
def start() -> Iterator[Callable[..., Others]]:
    made: list[Others] = []

    def others(*roles: str, num_chunks: int = 8, chunk_bytes: int = 4096) -> Others:
        started = [_start(role) for role in roles]
        writer = BroadcastWriter(RingShape(len(roles), num_chunks, chunk_bytes))
        made.append(Others(writer, [process for process, _ in started], [channel for _, channel in started]))
        for index, channel in enumerate(made[-1].channels):
            invite(writer, channel, index)
        for channel in made[-1].channels:
            assert channel.receive() == Seen(0, 0)
        return made[-1]

    yield others
    for one in made:
        for process, channel in zip(one.processes, one.channels, strict=True):
            process.kill()
            process.wait()
            channel.close()
        one.writer.close()


def test_two_processes_get_100_000_messages_in_order(start: Callable[..., Others]) -> None:
    others = start("count", "echo")
    seen = [Seen(0, 0)]

    def listen() -> None:
        while seen[-1].count < 100_000 and (answer := others.channels[1].receive()) is not None:
            seen[0] = answer

    listening = threading.Thread(target=listen)
    listening.start()
    try:
        for value in range(100_000):
            size = 600 if value % 10_007 == 0 else 2000 if value % 20_011 == 0 else 3
            others.writer.write(number(value, size), others.channels, timeout=60)
        listening.join(60)
    finally:
        others.channels[1].close()
        listening.join()
    assert seen[0] == Seen(100_000, 0)


def test_every_reader_gets_every_size_in_order(make: Callable[..., Pair]) -> None:
    pair = make()
    sizes = [0, 1, APART_BYTES // 4 - 1, APART_BYTES // 4, 480, 500, 1000, 5000]
    for value, size in enumerate(sizes * 3):
        pair.write(value, size)
        for reader in (0, 1):
            message = pair.read(reader)
            assert (message.value, len(message.array)) == (value, size)
            assert message.array.flags.writeable
    assert not any(reader.readable() for reader in pair.readers)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1500)), max_size=60))
def test_any_interleaving_keeps_the_order(actions: list[tuple[int, int]]) -> None:
    with contextlib.ExitStack() as stack:
        writer = BroadcastWriter(RingShape(3, 4, 4096))
        stack.callback(writer.close)
        channels, readers = [], []
        for index in range(3):
            ours, theirs = (Channel(one, Any_) for one in socket.socketpair())
            invite(writer, ours, index)
            channels.append(ours)
            readers.append(attach(theirs))
            for closing in (theirs.close, ours.close, readers[-1].close):
                stack.callback(closing)
        pair = Pair(writer, channels, readers)
        num_written, num_read = 0, [0, 0, 0]
        for action, size in actions:
            if action == 3 and num_written - min(num_read) < 4:
                pair.write(num_written, size)
                num_written += 1
            elif action < 3:
                assert pair.readers[action].readable() == (num_read[action] < num_written)
                if num_read[action] < num_written:
                    assert pair.read(action).value == num_read[action]
                    num_read[action] += 1


def test_a_borrowed_field_is_read_in_place_and_cannot_be_written(make: Callable[..., Pair]) -> None:
    pair = make(1)
    pair.write(7, 400)

    def consume(message: Number) -> None:
        assert isinstance(message.borrowed.data, memoryview)
        assert message.borrowed.data.readonly
        assert np.shares_memory(np.frombuffer(message.borrowed.data, np.uint8), np.asarray(pair.readers[0]._chunk))
        assert not np.shares_memory(message.array, np.asarray(pair.readers[0]._chunk))

    assert pair.readers[0].read(consume)


def test_a_consumer_that_raises_frees_its_chunk(make: Callable[..., Pair]) -> None:
    pair = make(1, num_chunks=1)

    def fail(message: Number) -> None:
        raise KeyError(message.value)

    for value in range(3):
        pair.write(value)
        with pytest.raises(KeyError, match=str(value)):
            pair.readers[0].read(fail)
    pair.write(3)
    assert pair.read().value == 3


def test_a_message_of_another_kind_is_refused_and_skipped(make: Callable[..., Pair]) -> None:
    pair = make(1)
    pair.writer.write({"type": "Evil"}, pair.channels)
    with pytest.raises(ValueError, match="Evil"):
        pair.readers[0].read(print)
    pair.write(1)
    assert pair.read().value == 1


def test_what_cannot_be_sent_leaves_the_ring_as_it_was(make: Callable[..., Pair], monkeypatch) -> None:
    pair = make(1, num_chunks=1)
    pair.write(0)
    assert pair.read().value == 0
    with pytest.raises(TypeError, match="object cannot be sent"):
        pair.writer.write(object(), pair.channels)
    with monkeypatch.context() as patched:
        patched.setattr("frame.core.processes.channel.pack.__defaults__", (100,))
        with pytest.raises(FrameTooLargeError):
            pair.write(1, 5000)
    assert not pair.readers[0].readable()
    pair.write(1)
    assert pair.read().value == 1


@pytest.mark.parametrize("place", [(4095, 5), (0, -1), (-1, 5)])
def test_a_place_outside_of_the_chunk_is_refused(make: Callable[..., Pair], place: tuple[int, int]) -> None:
    pair = make(1)
    with pytest.raises(ValueError, match=f"a broadcast names {place[1]} bytes at {place[0]} of a chunk of 4096"):
        pair.readers[0]._find(*place)


def test_a_slow_reader_blocks_the_writer_and_loses_nothing(start: Callable[..., Others]) -> None:
    others = start("slow", "count", num_chunks=2)
    begin = time.monotonic()
    for value in range(12):
        others.write(value)
    assert time.monotonic() - begin > 9 * 0.02  # all but the last two chunks were waited for


def test_the_writer_names_the_readers_that_are_late(start: Callable[..., Others]) -> None:
    others = start("count", "stuck", num_chunks=2)
    others.write(0)
    others.write(1)
    with pytest.raises(TimeoutError, match=r"readers \[1\] of 2 have not finished message 0 of a broadcast for 1 s"):
        others.write(2, timeout=1)


def test_the_writer_names_the_readers_that_do_not_take_a_large_message(start: Callable[..., Others]) -> None:
    others = start("count", "stuck")
    others.write(0)
    with pytest.raises(TimeoutError, match=r"peers \[1\] of 2 did not take a message in 2 s"):
        others.write(1, 1_000_000, timeout=2)


def test_a_reader_says_that_the_writer_is_late(make: Callable[..., Pair]) -> None:
    pair = make(1)
    with pytest.raises(TimeoutError, match=r"the writer of a broadcast sent no message 0 for 0\.05 seconds"):
        pair.read(timeout=0.05)
    pair.write(0)
    assert pair.read().value == 0


@pytest.mark.parametrize("size", [4, 1_000_000], ids=["ring", "overflow"])
def test_a_killed_reader_ends_the_writers_wait(start: Callable[..., Others], size: int) -> None:
    others = start("count", "stuck", num_chunks=2)
    others.write(0)
    threading.Timer(0.2, others.processes[1].kill).start()

    def write_on() -> None:
        for value in range(1, 100):
            others.write(value, size)

    with pytest.raises(RuntimeError, match="reader 1 is dead"):
        write_on()


@pytest.mark.parametrize("count", [0, 3])
def test_a_killed_writer_ends_the_reader_after_what_it_sent(count: int) -> None:
    process, channel = _start("write", count)
    reader = attach(channel)
    got: list[int] = []
    for _ in range(count):
        assert reader.read(lambda message: got.append(message.value), 60)
    assert channel.receive() == Seen(count, 0)
    timer = threading.Timer(0.2, lambda: os.kill(process.pid, signal.SIGKILL))
    timer.start()
    assert not reader.read(lambda message: got.append(message.value), 60)
    assert got == list(range(count))
    timer.join()
    process.wait()
    reader.close()
    reader.close()
    channel.close()


def test_an_idle_reader_takes_no_processor_time(make: Callable[..., Pair]) -> None:
    pair = make(1)
    pair.write(0)
    pair.read()
    before = resource.getrusage(resource.RUSAGE_THREAD)
    with pytest.raises(TimeoutError):
        pair.read(timeout=0.5)
    after = resource.getrusage(resource.RUSAGE_THREAD)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05


def test_a_sleeping_reader_is_woken(make: Callable[..., Pair]) -> None:
    pair = make(1)
    for value in range(20):
        writing = threading.Timer(0.005, pair.write, [value])
        writing.start()
        assert pair.read().value == value
        writing.join()


def test_only_readers_that_sleep_are_rung(make: Callable[..., Pair]) -> None:
    pair = make(2)
    sleeping = threading.Thread(target=pair.read, args=[1])
    sleeping.start()
    while not pair.readers[1]._asleep[1]:
        time.sleep(0.001)
    pair.write(0)
    sleeping.join()
    assert pair.read(0).value == 0
    with pytest.raises(BlockingIOError):
        os.eventfd_read(pair.writer.descriptors(0)[1])
    assert bytes(pair.readers[0]._asleep) == bytes(2)


class NoSleep:
    """In the place of a reader's poll object."""

    def poll(self, milliseconds: float | None) -> list[tuple[int, int]]:
        raise AssertionError("the reader slept")


def later(pair: Pair, seconds: float, value: int) -> None:
    """Writes after a while in which the reader waits."""
    writing = threading.Timer(seconds, pair.write, [value])
    writing.start()
    try:
        assert pair.read().value == value
    finally:
        writing.join()


def test_a_reader_looks_on_while_messages_come(make: Callable[..., Pair], monkeypatch) -> None:
    monkeypatch.setattr("frame.links.lookout._TAKEN_SECONDS", 1e9)  # others that want the processor do not count
    pair = make(1)
    reader = pair.readers[0]
    reader._lookout = Lookout(0.5)
    later(pair, 0.01, 0)  # which comes to a sleeper, since nothing came before
    poll, reader._poll = reader._poll, NoSleep()
    later(pair, 0.01, 1)
    later(pair, 0.01, 2)
    reader._poll = poll
    later(pair, 1.0, 3)
    reader._poll = NoSleep()
    with pytest.raises(AssertionError, match="the reader slept"):
        later(pair, 0.01, 4)
    assert bytes(reader._asleep) == b"\0"


@pytest.mark.parametrize("shape", [RingShape(0), RingShape(1, 0), RingShape(1, 1, 8), RingShape(1, 1, 1 << 32)])
def test_a_ring_that_cannot_be_is_refused(shape: RingShape) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="a ring has a reader, a chunk"):
        BroadcastWriter(shape)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_nothing_stays_behind_and_nobody_shrinks_the_memory() -> None:
    shared = set(os.listdir("/dev/shm"))
    descriptors = len(os.listdir("/proc/self/fd"))
    writer = BroadcastWriter(RingShape(2))
    assert set(os.listdir("/dev/shm")) == shared
    with pytest.raises(PermissionError):
        os.ftruncate(writer.descriptors(0)[0], 0)
    writer.close()
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_borrowed_field_passes_a_socket_too() -> None:
    left, right = (Channel(one, Any_) for one in socket.socketpair())
    left.send(Number(1, np.zeros(0, np.int32), Borrowed(b"abc")))
    assert bytes(right.receive().borrowed.data) == b"abc"
    left.close()
    right.close()
