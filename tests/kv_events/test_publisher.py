"""Batches over sockets: numbers, replays, ports of ranks, subscribers that are slow or gone. Real ZMQ."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from frame.kv_events.events import Cleared
from frame.kv_events.publisher import AddressError, Publisher, SentBatches, Sockets
from tests.free_ports import free_ports
from tests.kv_events.listening import opened, received, replayed, until_it_listens

Make = Callable[..., Publisher]


def numbered(seconds: float, events: list[Any]) -> bytes:
    return b",".join(str(event).encode() for event in events)


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes publishers that are closed in the end."""
    made: list[Publisher] = []

    def publisher(endpoint: str, encode: Any = numbered, **options: Any) -> Publisher:
        made.append(Publisher(Sockets(endpoint=endpoint, **options), encode))
        return made[-1]

    yield publisher
    for one in made:
        one.close()
        assert not one._thread.is_alive()


def address() -> str:
    return f"tcp://127.0.0.1:{free_ports()}"


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_batches_arrive_in_order_with_topic_and_number(make: Make) -> None:
    where = address()
    publisher = make(where, topic="kv@here")
    with opened(zmq.SUB, where, SUBSCRIBE=b"kv@") as sub, opened(zmq.SUB, where, SUBSCRIBE=b"other") as deaf:
        first = until_it_listens(publisher, sub)
        for place in range(500):
            publisher.publish([place])
        got = []
        while len(got) < 500:
            topic, number, payload = received(sub)
            assert topic == b"kv@here"
            if payload:
                got.append((number, payload))
        assert [payload for _, payload in got] == [str(place).encode() for place in range(500)]
        numbers = [number for number, _ in got]
        assert numbers == list(range(numbers[0], numbers[0] + 500))
        assert numbers[0] > first
        assert not deaf.poll(50)
    assert publisher.num_dropped == 0
    assert publisher.num_events == 500


def test_replay_without_gaps(make: Make) -> None:
    """More batches than a socket of ZMQ holds by default; the oldest are forgotten."""
    where, again = address(), address()
    publisher = make(where, replay_endpoint=again, buffer_steps=3000)
    for place in range(4000):
        publisher.publish([place])
    with opened(zmq.DEALER, again, RCVHWM=0) as dealer:
        while publisher._queue:
            time.sleep(0.01)
        assert replayed(dealer, 0) == [(place, str(place).encode()) for place in range(1000, 4000)]
        assert replayed(dealer, 3998) == [(3998, b"3998"), (3999, b"3999")]
        assert replayed(dealer, 4000) == []
        assert replayed(dealer, 2**64 - 1) == []


def test_the_buffer_is_bounded_in_bytes_too(make: Make) -> None:
    """Steps of long prompts make large batches: 10,000 of them could fill the engine's memory."""
    again = address()
    sizes = iter([300, 300, 300, 100, 2000, 10, 20])
    publisher = make(
        address(),
        lambda seconds, events: bytes(next(sizes)),
        replay_endpoint=again,
        buffer_steps=100,
        buffer_bytes=1000,
    )
    with opened(zmq.DEALER, again) as dealer:
        for place, kept in enumerate([1, 2, 3, 4, 0, 1, 2]):
            publisher.publish([place])
            deadline = time.monotonic() + 60
            while len(replayed(dealer, 0)) != kept:
                assert time.monotonic() < deadline
    assert publisher._sent.num_bytes == 30


def test_a_req_socket_gets_its_one_answer(make: Make) -> None:
    where, again = address(), address()
    publisher = make(where, replay_endpoint=again)
    publisher.publish([7])
    with opened(zmq.REQ, again) as req:
        while publisher._queue:  # the thread that takes from it answers afterwards
            time.sleep(0.001)
        req.send((0).to_bytes(8, "big"))
        assert req.recv_multipart() == [(0).to_bytes(8, "big"), b"7"]


@pytest.mark.parametrize(
    "frames",
    [(b"",), (b"", b"1"), (b"x", bytes(8)), (b"", bytes(8), b""), (b"", b"a" * 1000), (b"", b"a" * 2000)],
    ids=["one", "short", "no delimiter", "three", "long", "above the bound"],
)
def test_what_is_no_request_for_a_replay_is_ignored(make: Make, frames: tuple[bytes, ...]) -> None:
    again = address()
    publisher = make(address(), replay_endpoint=again)
    publisher.publish([1])
    while publisher._queue:
        time.sleep(0.001)
    with opened(zmq.DEALER, again) as wrong:
        wrong.send_multipart(frames)
        assert not wrong.poll(100)
    with opened(zmq.DEALER, again) as right:
        assert replayed(right, 0) == [(0, b"1")]


def test_a_client_of_replays_that_reads_nothing_harms_nobody(make: Make) -> None:
    where, again = address(), address()
    publisher = make(where, lambda seconds, events: bytes(10_000), replay_endpoint=again, buffer_steps=500)
    for _ in range(500):
        publisher.publish([1])
    with opened(zmq.DEALER, again, RCVHWM=1) as rude, opened(zmq.SUB, where, SUBSCRIBE=b"") as sub:
        for _ in range(20):
            rude.send_multipart((b"", bytes(8)))
        until_it_listens(publisher, sub)
        with opened(zmq.DEALER, again, RCVHWM=0) as polite:
            assert len(replayed(polite, 0)) == 500


def test_replays_that_nobody_reads_take_the_memory_of_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these connections had all that is kept copied for itself by one message of 8 bytes."""
    where, again, payload, asked = address(), address(), bytes(1 << 20), 12
    answered, since = [], SentBatches.since

    def counted(self: SentBatches, place: bytes) -> Any:
        yield from since(self, place)
        answered.append(place)

    monkeypatch.setattr(SentBatches, "since", counted)
    publisher = make(where, encode=lambda seconds, events: payload, replay_endpoint=again)
    for _ in range(20):
        publisher.publish([0])
    until(lambda: len(publisher._sent) == 20)
    before = resident_bytes()
    with ExitStack() as stack:
        options = {"RCVHWM": 1, "RCVBUF": 4096}
        for number in range(asked):
            silent = stack.enter_context(opened(zmq.DEALER, again, **options))
            silent.send_multipart((b"", bytes(8)))
            until(lambda number=number: len(answered) > number)  # type: ignore[misc]
        # what lies between the two ends, a few messages each, is not the publisher's
        assert resident_bytes() - before < asked * 10 * len(payload)


def test_a_replay_makes_way_for_the_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending without a pause kept the engine's thread waiting for the interpreter: 3 ms in one of a hundred times."""
    again, pauses, sleep = address(), list[float](), time.sleep
    publisher = make(address(), replay_endpoint=again)
    for place in range(5000):
        publisher.publish([place])
    while publisher._queue:
        time.sleep(0.01)

    def paused(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", paused)
    with opened(zmq.DEALER, again, RCVHWM=0) as dealer:
        assert len(replayed(dealer, 0)) == 5000
    assert 5000 // 64 <= len(pauses) <= 5000 // 16
    assert max(pauses) < 0.001


def test_a_slow_subscriber_never_blocks_the_step(make: Make) -> None:
    """The thread hangs: the caller goes on, what finds no room is dropped and counted, and its numbers are missing."""
    go, where = threading.Event(), address()

    def slow(seconds: float, events: list[Any]) -> bytes:
        go.wait()
        return numbered(seconds, events)

    publisher = make(where, slow, max_queue_size=50, replay_endpoint=(again := address()))
    publisher.publish([0, 0])
    while publisher._queue:
        time.sleep(0.001)
    start = time.perf_counter()
    for place in range(1, 10_000):
        publisher.publish([place])
    assert time.perf_counter() - start < 30
    assert (publisher.num_events, publisher.num_dropped) == (2 + 50, 9999 - 50)
    go.set()
    while publisher._queue:
        time.sleep(0.001)
    publisher.publish(["later"])
    with opened(zmq.DEALER, again) as dealer:
        while publisher._queue:  # the thread that takes from it answers afterwards
            time.sleep(0.001)
        numbers = [number for number, _ in replayed(dealer, 0)]
    assert numbers == [*range(51), 10_000]


def test_a_subscriber_that_stops_reading_misses_what_is_above_its_mark_and_nobody_waits(make: Make) -> None:
    where = address()
    publisher = make(where, lambda seconds, events: bytes(1 << 16), hwm=4)
    with opened(zmq.SUB, where, SUBSCRIBE=b"", RCVHWM=1) as sub:
        first = until_it_listens(publisher, sub)
        for _ in range(2000):
            publisher.publish([1])
        while publisher._queue:
            time.sleep(0.001)
        numbers = []
        while sub.poll(200):
            numbers.append(received(sub)[1])
        assert numbers == sorted(numbers)
        assert first < numbers[-1]
        assert len(numbers) < 2000


def test_a_batch_that_cannot_be_encoded_is_dropped_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    again = address()
    publisher = make(
        address(), lambda seconds, events: events[0].encode(), replay_endpoint=again
    )  # a lone surrogate cannot be encoded
    for text in ("a", "\ud800", "b"):
        publisher.publish([text])
    deadline = time.monotonic() + 60
    while len(publisher._sent) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    with opened(zmq.DEALER, again) as dealer:
        assert replayed(dealer, 0) == [(0, b"a"), (2, b"b")]
    assert publisher.num_dropped == 1
    assert "cannot be encoded" in caplog.text


def test_close_drains(make: Make) -> None:
    where = address()
    publisher = make(where)
    with opened(zmq.SUB, where, SUBSCRIBE=b"", RCVHWM=0) as sub:
        until_it_listens(publisher, sub)
        for place in range(5000):
            publisher.publish([place])
        publisher.close()
        publisher.close()
        publisher.publish(["late"])
        payloads = []
        while not payloads or payloads[-1] != b"4999":
            payload = received(sub)[2]
            payloads += [payload] if payload else []
        assert payloads == [str(place).encode() for place in range(5000)]
        assert not sub.poll(50)
    assert publisher.num_dropped == 1


def test_closing_does_not_wait_for_a_subscriber_that_never_came(make: Make) -> None:
    publisher = make(address(), connect=True)
    publisher.publish([Cleared()])
    start = time.monotonic()
    publisher.close()
    assert time.monotonic() - start < 30


def test_it_connects_to_a_subscriber_that_listens(make: Make) -> None:
    where = address()
    with opened(zmq.SUB, where, bind=True, SUBSCRIBE=b"") as sub:
        publisher = make(where, connect=True)
        until_it_listens(publisher, sub)


def test_it_serves_the_same_process_and_unix_sockets(make: Make, tmp_path: Path) -> None:
    for where in ("inproc://kv-events-test", f"ipc://{tmp_path}/events"):
        publisher = make(where)
        context = zmq.Context.instance() if where.startswith("inproc") else None
        with opened(zmq.SUB, where, SUBSCRIBE=b"", context=context) as sub:
            until_it_listens(publisher, sub)


def test_curve_keeps_those_out_who_do_not_know_the_public_key(make: Make) -> None:
    where, again = address(), address()
    public, secret = zmq.curve_keypair()
    publisher = make(where, replay_endpoint=again, curve_key=secret)
    mine, my_secret = zmq.curve_keypair()
    own = {"CURVE_PUBLICKEY": mine, "CURVE_SECRETKEY": my_secret}
    known = {**own, "CURVE_SERVERKEY": public}
    with (
        opened(zmq.SUB, where, SUBSCRIBE=b"", **known) as sub,
        opened(zmq.SUB, where, SUBSCRIBE=b"") as plain,
        opened(zmq.SUB, where, SUBSCRIBE=b"", **own, CURVE_SERVERKEY=mine) as wrong,
        opened(zmq.DEALER, again) as stranger,
        opened(zmq.DEALER, again, **known) as dealer,
    ):
        until_it_listens(publisher, sub)
        assert replayed(dealer, 0)
        stranger.send_multipart((b"", bytes(8)))
        publisher.publish([1])
        assert not any(one.poll(150) for one in (plain, wrong, stranger))


def test_a_port_in_use_is_an_error_and_leaves_nothing_open(make: Make) -> None:
    where, again = address(), address()
    before = threading.active_count()
    make(again)
    with pytest.raises(AddressError):
        Publisher(Sockets(endpoint=where, replay_endpoint=again), numbered)
    make(where)  # which the failed one had
    assert threading.active_count() == before + 2
