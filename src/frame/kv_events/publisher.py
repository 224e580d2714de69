"""Sends batches of KV events over ZMQ from a thread of its own. Knows bytes and numbers, no event's fields.

A message has three frames: the topic, the number of the batch in 8 bytes, and the payload. At the address for replays
it is asked for all batches from a number on, and answers with one message for each and one of number -1 at the end.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from .addresses import host_of
from .events import Event

logger = logging.getLogger("frame.events")

#: The number of the message behind the last one of a replay.
END = (-1).to_bytes(8, "big", signed=True)
#: Milliseconds that closing waits for subscribers to take what was sent.
LINGER_MILLISECONDS = 1000
#: Bytes that a frame may have that comes from a subscriber.
MAX_FRAME = 1024
#: Replays that are answered before new batches are looked for.
_REPLAYS_IN_A_ROW = 8
_CLOSE_SECONDS = 10.0
#: So many messages are sent before the thread sleeps for a moment: sending alone never lets go of the interpreter.
_MESSAGES_AT_ONCE, _PAUSE_SECONDS = 32, 0.0001


@dataclass(frozen=True, kw_only=True)
class Sockets:
    """Where a publisher sends, and how much waits there; as the settings `kv_events_…`, of one data rank."""

    endpoint: str
    connect: bool = False
    replay_endpoint: str | None = None
    curve_key: bytes | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    buffer_bytes: int = 256 << 20
    hwm: int = 100_000
    max_queue_size: int = 100_000


class AddressError(Exception):
    """`address` cannot be had; the text says why."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(why)
        self.address = address


class SentBatches:
    """The newest batches that were sent: at most `most` of them, whose payloads have at most `most_bytes` together.

    Payloads are ZMQ's messages, whose bytes all share to whom one is sent: who asks for replays and reads none would
    have a copy of each made else.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._batches: deque[tuple[bytes, zmq.Frame]] = deque()
        self._most = most
        self._most_bytes = most_bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, place: bytes, payload: zmq.Frame) -> None:
        """Keeps a batch, and forgets the oldest ones for it; itself, too, where it alone is above the bound."""
        self._batches.append((place, payload))
        self.num_bytes += len(payload)
        while len(self._batches) > self._most or self.num_bytes > self._most_bytes:
            self.num_bytes -= len(self._batches.popleft()[1])

    def since(self, place: bytes) -> Iterator[tuple[bytes, zmq.Frame]]:
        """Number and payload of each that is kept, from the number `place` on."""
        return ((number, payload) for number, payload in self._batches if number >= place)


class Publisher:
    """Numbers batches from 0 on and sends them; `encode` makes the payload of events at a time.

    The engine's thread calls `publish`, which never waits: where too many batches wait, one is dropped, and its number
    is missing for subscribers. Raises `AddressError` for an address that cannot be had.
    """

    def __init__(self, sockets: Sockets, encode: Callable[[float, list[Event]], bytes]) -> None:
        self.num_events = 0  # which were accepted
        self._num_refused = 0  # by the engine's thread
        self._num_unsent = 0  # by the other one
        self._encode = encode
        self._curve_key = sockets.curve_key
        self._topic = sockets.topic.encode()
        self._most = sockets.max_queue_size
        self._queue: deque[tuple[int, float, list[Event]]] = deque()
        self._sent = SentBatches(sockets.buffer_steps, sockets.buffer_bytes)
        self._next = 0
        self._closing = False
        self._failed = False
        # other threads of the process are to find an inproc address
        shared = sockets.endpoint.startswith("inproc://")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance() if shared else zmq.Context()
        self._shared = shared
        self._waker, self._bell = socket.socketpair()
        self._waker.setblocking(False)
        self._bell.setblocking(False)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._events = self._open(zmq.PUB, sockets.endpoint, sockets.hwm, connect=sockets.connect)
            if sockets.replay_endpoint is not None:
                # a whole replay fits, and its end
                self._replay = self._open(zmq.ROUTER, sockets.replay_endpoint, sockets.buffer_steps + 1)
        except BaseException:
            self._close_sockets(0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Events whose batch found no room, or could not be sent."""
        return self._num_refused + self._num_unsent

    def publish(self, events: list[Event]) -> None:
        """Takes a batch, which nobody changes afterwards."""
        number = self._next
        self._next += 1
        if self._failed or self._closing or len(self._queue) >= self._most:
            self._num_refused += len(events)
            return
        self.num_events += len(events)
        self._queue.append((number, time.time(), events))
        self._ring()

    def close(self) -> None:
        """Sends what waits and closes the sockets. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._ring()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("KV events are still being sent after %g seconds; they are given up", _CLOSE_SECONDS)

    def _ring(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            pass  # rung often enough
        except OSError:
            self._failed = True  # the thread has ended

    def _open(self, kind: int, address: str, hwm: int, *, connect: bool = False) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        try:
            made.setsockopt(zmq.SNDHWM, hwm)
            made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
            made.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
            made.setsockopt(zmq.IPV6, ":" in host_of(address))
            if self._curve_key is not None:
                made.setsockopt(zmq.CURVE_SERVER, True)
                made.setsockopt(zmq.CURVE_SECRETKEY, self._curve_key)
            (made.connect if connect else made.bind)(address)
        except zmq.ZMQError as error:
            made.close(0)
            unknown = "its host is no address of this machine"
            why = unknown if error.errno == errno.ENODEV else zmq.strerror(error.errno or 0)
            raise AddressError(address, why) from None
        except BaseException:
            made.close(0)
            raise
        return made

    def _run(self) -> None:
        """The thread, which alone uses the sockets from now on."""
        try:
            poller = zmq.Poller()
            poller.register(self._bell, zmq.POLLIN)
            if self._replay is not None:
                poller.register(self._replay, zmq.POLLIN)
            while True:
                closing = self._closing  # before the queue is emptied, so that nothing comes after
                self._send()
                if closing:
                    break
                ready = dict(poller.poll())
                if self._bell.fileno() in ready:
                    self._bell.recv(4096)
                if self._replay in ready:
                    self._answer(self._replay)
        except Exception:
            logger.exception("KV events are published no more")
        finally:
            self._failed = True
            self._close_sockets(LINGER_MILLISECONDS)

    def _send(self) -> None:
        while self._queue:
            number, seconds, events = self._queue.popleft()
            try:
                place, payload = number.to_bytes(8, "big"), zmq.Frame(self._encode(seconds, events), copy=True)
            except Exception:
                logger.exception("a batch of KV events cannot be encoded; subscribers miss it")
                self._num_unsent += len(events)
                continue
            self._events.send_multipart((self._topic, place, payload))
            self._sent.add(place, payload)
            if number % _MESSAGES_AT_ONCE == 0 and self._queue:
                time.sleep(_PAUSE_SECONDS)

    def _answer(self, replay: Any) -> None:
        for _ in range(_REPLAYS_IN_A_ROW):
            try:
                frames = replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                logger.warning("a request for KV events is not an empty frame and a number of 8 bytes; it is ignored")
                continue
            who, _, start = frames
            for count, (place, payload) in enumerate(self._sent.since(start), 1):
                replay.send_multipart((who, b"", place, payload))
                if count % _MESSAGES_AT_ONCE == 0:
                    time.sleep(_PAUSE_SECONDS)
            replay.send_multipart((who, b"", END, b""))

    def _close_sockets(self, linger: int) -> None:
        for made in (getattr(self, "_events", None), self._replay):
            if made is not None:
                made.close(linger)
        if not self._shared:
            self._context.term()
        self._waker.close()
        self._bell.close()
