"""Servers whose events are followed over sockets: what a listener knows is what is there, or less. Real ZMQ."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from frame.kv_events.changes import KVChange, KVCleared, KVRemoved, KVStored
from frame.kv_events.followers import Followers, KVSource
from frame.kv_events.publisher import Publisher, Sockets
from frame.kv_events.reader import MOST_BYTES
from tests.free_ports import free_ports

URL = "http://one"


class Known:
    """A listener: the names of blocks that can be found, by server and rank, and how often it had to forget."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], set[Any]] = {}
        self.num_cleared = 0

    def changed(self, url: str, rank: int, change: KVChange) -> None:
        blocks = self.blocks.setdefault((url, rank), set())
        if isinstance(change, KVStored):
            blocks |= set(change.names)
        elif isinstance(change, KVRemoved):
            blocks -= set(change.names)
        else:
            assert isinstance(change, KVCleared)
            self.num_cleared += bool(blocks)
            blocks.clear()

    def until(self, names: Any, rank: int = 0, url: str = URL) -> None:
        until(lambda: self.blocks.get((url, rank), set()) == set(names), lambda: str(self.blocks))


def until(true: Callable[[], bool], text: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, text()
        time.sleep(0.005)


def encode(seconds: float, events: list[Any]) -> bytes:
    return msgspec.msgpack.encode([seconds, events, 0])


def stored(*names: int) -> list[Any]:
    return ["BlockStored", list(names), None, [0] * len(names), 1, None, "GPU"]


@contextmanager
def publishing(address: str, **options: Any) -> Iterator[Publisher]:
    made = Publisher(Sockets(endpoint=address, **options), encode)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def following(*sources: KVSource, key: bytes | None = None) -> Iterator[tuple[Known, Followers]]:
    known = Known()
    followers = Followers(known.changed, key)
    followers.follow(sources)
    try:
        yield known, followers
    finally:
        followers.close()
        assert not followers._thread.is_alive()


def addresses(count: int = 2) -> list[str]:
    first = free_ports(count)
    return [f"tcp://127.0.0.1:{first + place}" for place in range(count)]


def sent(publisher: Publisher) -> None:
    until(lambda: not publisher._queue)
    time.sleep(0.05)


def test_what_was_published_before_is_asked_for_and_then_followed() -> None:
    where, again = addresses()
    with publishing(where, replay_endpoint=again) as publisher:
        for name in range(300):
            publisher.publish([stored(name)])
        with following(KVSource(URL, 0, where, again)) as (known, _):
            known.until(range(300))
            publisher.publish([["BlockRemoved", [0], "GPU"], stored(400)])
            known.until([*range(1, 300), 400])
            publisher.publish([["AllBlocksCleared"]])
            known.until([])


def test_without_replays_it_knows_what_came_since() -> None:
    (where,) = addresses(1)
    with publishing(where) as publisher, following(KVSource(URL, 0, where)) as (known, _):
        names = iter(range(1, 10_000))

        def heard() -> bool:
            publisher.publish([stored(next(names))])
            return bool(known.blocks)

        until(heard)
        assert known.num_cleared == 0


class Scripted:
    """Sends what a test says as an engine would: any number, any bytes, and any answer to a question for replays."""

    def __init__(self, where: str, again: str, replay: list[tuple[bytes, ...]] | None) -> None:
        self._context = zmq.Context()
        self.events = self._context.socket(zmq.XPUB)
        self.events.bind(where)
        self.replays = self._context.socket(zmq.ROUTER)
        self.replays.bind(again)
        self.replay = replay
        self.asked: list[int] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def subscribed(self) -> None:
        assert self.events.poll(10_000)
        self.events.recv()

    def send(self, number: int, *events: Any) -> None:
        self.events.send_multipart((b"", number.to_bytes(8, "big"), encode(1, list(events))))

    def _answer(self) -> None:
        while not self._closing.is_set():
            if self.replays.poll(20):
                who, _, start = self.replays.recv_multipart()
                self.asked.append(int.from_bytes(start, "big"))
                for answer in self.replay or ():
                    self.replays.send_multipart((who, *answer))

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.events.close(0)
        self.replays.close(0)
        self._context.term()


@contextmanager
def scripted(replay: list[tuple[bytes, ...]] | None, **options: Any) -> Iterator[tuple[Scripted, Known]]:
    where, again = addresses()
    engine = Scripted(where, again, replay)
    try:
        with following(KVSource(URL, 0, where, again if options.get("asks", True) else None)) as (known, _):
            engine.subscribed()
            yield engine, known
    finally:
        engine.close()


END = (b"", b"\xff" * 8, b"")


def batch(number: int, *events: Any) -> tuple[bytes, ...]:
    return b"", number.to_bytes(8, "big"), encode(1, list(events))


def test_a_gap_is_filled_by_a_replay() -> None:
    with scripted([END]) as (engine, known):
        until(lambda: engine.asked == [0])
        engine.send(0, stored(1))
        known.until([1])
        engine.replay = [batch(1, stored(2)), batch(2, stored(3)), END]
        engine.send(3, stored(4))
        known.until([1, 2, 3, 4])
        assert (engine.asked, known.num_cleared) == ([0, 1], 0)


@pytest.mark.parametrize(
    "replay",
    [
        [END],
        [batch(2, stored(3)), END],
        [(b"", b"short"), END],
        [(b"x", bytes(8), b"y", b"z"), END],
    ],
    ids=["empty", "too late", "another form", "too many frames"],
)
def test_a_gap_that_stays_one_has_the_server_forgotten(replay: list[tuple[bytes, ...]]) -> None:
    with scripted([END]) as (engine, known):
        until(lambda: engine.asked == [0])
        engine.send(0, stored(1))
        known.until([1])
        engine.replay = replay
        engine.send(3, stored(4))
        until(lambda: 4 in known.blocks[URL, 0])
        assert (1 in known.blocks[URL, 0], known.num_cleared) == (False, 1)
        engine.send(4, stored(5))
        until(lambda: 5 in known.blocks[URL, 0])
        assert engine.asked == [0, 1]


def test_a_server_of_replays_that_is_silent_holds_up_neither_others_nor_itself_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("frame.kv_events.followers._REPLAY_SECONDS", 0.5)
    with scripted(None) as (engine, known), scripted([END]) as (other, heard):
        other.send(0, stored(9))
        heard.until([9])
        engine.send(0, stored(1))
        known.until([1])
        engine.send(5, stored(2))
        known.until([2])


def test_without_replays_a_gap_has_the_server_forgotten() -> None:
    with scripted(None, asks=False) as (engine, known):
        engine.send(0, stored(1))
        engine.send(1, stored(2))
        known.until([1, 2])
        engine.send(3, stored(3))
        known.until([3])
        assert engine.asked == []


def test_numbers_that_begin_again_are_those_of_another_engine() -> None:
    with scripted([END], asks=False) as (engine, known):
        for number in range(3):
            engine.send(number, stored(number))
        known.until([0, 1, 2])
        engine.send(0, stored(7))
        known.until([7])


def test_what_a_replay_brought_counts_once() -> None:
    with scripted([batch(0, stored(1)), batch(1, ["BlockRemoved", [1], "GPU"]), END]) as (engine, known):
        until(lambda: engine.asked == [0])
        engine.send(0, stored(1))
        engine.send(1, ["BlockRemoved", [1], "GPU"])
        engine.send(2, stored(3))
        known.until([3])
        assert known.num_cleared == 0


def test_what_cannot_be_read_has_the_server_forgotten_and_the_next_batch_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scripted([END]) as (engine, known):
        until(lambda: engine.asked == [0])
        engine.send(0, stored(1))
        known.until([1])
        engine.events.send_multipart((b"", (1).to_bytes(8, "big"), b"\xdd\xff\xff\xff\xff"))
        engine.events.send_multipart((b"", b"short", b""))
        engine.events.send_multipart((b"x",) * 1000)
        engine.send(2, stored(3))
        known.until([3])
        assert caplog.text.count("cannot be read") == 1


def test_a_frame_above_the_bound_ends_the_connection_unread() -> None:
    with scripted([END]) as (engine, known):
        engine.send(0, stored(1))
        known.until([1])
        engine.events.send_multipart((b"", (1).to_bytes(8, "big"), bytes(MOST_BYTES + 1)))
        known.until([])


def test_a_restart_begins_anew() -> None:
    where, again = addresses()
    with following(KVSource(URL, 0, where, again)) as (known, _):
        with publishing(where, replay_endpoint=again) as publisher:
            publisher.publish([stored(1)])
            known.until([1])
        known.until([])
        with publishing(where, replay_endpoint=again) as publisher:
            publisher.publish([stored(2)])
            publisher.publish([stored(3)])
            known.until([2, 3])


def test_ranks_are_told_apart_and_the_list_may_change() -> None:
    first = free_ports(4)
    where = [f"tcp://127.0.0.1:{first + place}" for place in range(4)]
    sources = [KVSource(URL, rank, where[rank], where[2 + rank]) for rank in range(2)]
    with (
        publishing(where[0], replay_endpoint=where[2]) as one,
        publishing(where[1], replay_endpoint=where[3]) as two,
        following(*sources) as (known, followers),
    ):
        one.publish([stored(1)])
        two.publish([stored(2)])
        known.until([1], rank=0)
        known.until([2], rank=1)
        followers.follow(sources[1:])
        known.until([], rank=0)
        two.publish([stored(3)])
        known.until([2, 3], rank=1)
        followers.follow(sources)
        known.until([1], rank=0)


def test_curve_needs_the_servers_key() -> None:
    where, again = addresses()
    public, secret = zmq.curve_keypair()
    with publishing(where, replay_endpoint=again, curve_key=secret) as publisher:
        publisher.publish([stored(1)])
        with following(KVSource(URL, 0, where, again)) as (deaf, _):
            with following(KVSource(URL, 0, where, again), key=public) as (known, _):
                known.until([1])
            assert not any(deaf.blocks.values())


def test_an_address_that_cannot_be_used_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    where, again = addresses()
    bad = KVSource("http://bad", 0, "ipc:///" + "x" * 200)
    half = KVSource("http://half", 0, where, "tcp://-no-host-:1")
    with publishing(where, replay_endpoint=again) as publisher:
        publisher.publish([stored(1)])
        with following(bad, half, KVSource(URL, 0, where, again)) as (known, _):
            known.until([1])
            publisher.publish([stored(2)])
            known.until([1, 2])
            known.until([2], url="http://half")
    assert "http://bad cannot be followed" in caplog.text
    assert "http://half cannot be asked for batches" in caplog.text


def test_a_listener_that_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    where, again = addresses()
    calls = []

    def wrong(url: str, rank: int, change: KVChange) -> None:
        calls.append(change)
        raise RuntimeError("oops")

    followers = Followers(wrong)
    try:
        with publishing(where, replay_endpoint=again) as publisher:
            followers.follow([KVSource(URL, 0, where, again)])
            for name in range(3):
                publisher.publish([stored(name)])
            until(lambda: len(calls) >= 3)
            assert caplog.text.count("the listener of KV events has failed") == 1
    finally:
        followers.close()


@pytest.mark.parametrize("buffer_steps", [3, 10_000])
def test_whatever_is_lost_nothing_is_known_that_is_not_there(buffer_steps: int) -> None:
    """Batches are dropped at random, and the server keeps few or all others for replays."""
    where, again = addresses()
    draw, there = random.Random(buffer_steps), set[int]()
    with (
        publishing(where, replay_endpoint=again, buffer_steps=buffer_steps) as publisher,
        following(KVSource(URL, 0, where, again)) as (known, _),
    ):
        for turn in range(40):
            for _ in range(draw.randrange(1, 8)):
                names = [draw.randrange(50) for _ in range(3)]
                kind = draw.choice(
                    ["store", "store", "remove", "clear"] if draw.random() < 0.1 else ["store", "remove"]
                )
                if kind == "store":
                    there |= set(names)
                elif kind == "remove":
                    there -= set(names)
                else:
                    there.clear()
                events = {"store": stored(*names), "remove": ["BlockRemoved", names], "clear": ["AllBlocksCleared"]}
                if draw.random() < 0.2:
                    publisher._next += 1  # as where too many wait
                else:
                    publisher.publish([events[kind]])
            # by its number a batch shows that others before it are missing
            there.add(1000 + turn)
            publisher.publish([stored(1000 + turn)])
            until(lambda turn=turn: 1000 + turn in known.blocks.get((URL, 0), ()))  # type: ignore[misc]
            assert known.blocks[URL, 0] <= there
    assert known.num_cleared
