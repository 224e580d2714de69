"""Follows the KV events of servers from a thread, and tells a listener what changes. Needs pyzmq.

What a listener knows of a server is at most what is there: where batches are missing and cannot be had again, where
they cannot be read, or where the server has gone, it is told to forget.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from .addresses import host_of
from .changes import KVChange, KVCleared
from .publisher import END
from .reader import MOST_BYTES, EventReader

logger = logging.getLogger("frame.events")

#: Batches that wait to be read, from a server and of a replay; ZMQ bounds them by number only.
_WAITING, _REPLAY_WAITING = 1000, 10_000
#: Seconds that all of a replay may take, and most batches of it.
_REPLAY_SECONDS, _MOST_REPLAYED = 10.0, 1 << 20
#: Batches of one server that are read before another one has its turn, and the pause after them, so that the event loop
#: of the process goes on.
_IN_A_ROW, _PAUSE_SECONDS = 16, 0.0001
_MOST_SOCKETS = 8192
_CLOSE_SECONDS = 5.0


class KVSource(NamedTuple):
    """Where a data rank of the server `url` publishes, and where it can be asked for what was missed, if it can."""

    url: str
    rank: int
    endpoint: str
    replay_endpoint: str | None = None

    def __str__(self) -> str:
        return f"{self.url}, rank {self.rank}" if self.rank else self.url


class _Followed:
    """What is known of one source. `held` is the batch that showed that others are missing, which are asked for."""

    def __init__(self, source: KVSource, events: Any, monitor: Any) -> None:
        self.source = source
        self.events = events
        self.monitor = monitor
        self.replay: Any = None
        self.held: tuple[int, bytes] | None = None
        self.deadline = 0.0
        self.num_replayed = 0
        self.begin()

    def begin(self) -> None:
        """Knows nothing: the server begins with an empty cache, and numbers its batches from 0."""
        self.reader = EventReader()
        self.expected = 0
        self.last: int | None = None
        self.warned = False


class Followers:
    """`changed(url, rank, change)` is called by the thread. With `server_key` the servers' events are encrypted."""

    def __init__(self, changed: Callable[[str, int, KVChange], None], server_key: bytes | None = None) -> None:
        self._changed = changed
        self._server_key = server_key
        self._wanted: frozenset[KVSource] = frozenset()
        self._followed: dict[KVSource, _Followed] = {}
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        self._poller = zmq.Poller()
        self._waker, self._bell = socket.socketpair()
        self._waker.setblocking(False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-followers", daemon=True)
        self._thread.start()

    def follow(self, sources: Collection[KVSource]) -> None:
        """Follows these from now on, and no others."""
        self._wanted = frozenset(sources)
        self._ring()

    def close(self) -> None:
        """Follows nothing any more."""
        if not self._closing:
            self._closing = True
            self._ring()
            self._thread.join(_CLOSE_SECONDS)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # rung often enough, or the thread has ended
            self._waker.send(b"\0")

    def _run(self) -> None:
        self._poller.register(self._bell, zmq.POLLIN)
        try:
            while not self._closing:
                self._turn()
        except Exception:
            logger.exception("KV events are followed no more")
        finally:
            for source in list(self._followed):
                self._drop(source)
            self._context.term()
            self._waker.close()
            self._bell.close()

    def _turn(self) -> None:
        deadlines = [one.deadline for one in self._followed.values() if one.replay is not None]
        wait = int(max(0.0, min(deadlines) - time.monotonic()) * 1000) + 1 if deadlines else None
        ready = dict(self._poller.poll(wait))
        if self._bell.fileno() in ready:
            self._bell.recv(4096)
            self._reconcile()
        for one in list(self._followed.values()):
            if one.monitor in ready:
                self._watch(one)
            if one.replay is not None and one.replay in ready:
                self._take_replayed(one)
            elif one.replay is not None and time.monotonic() >= one.deadline:
                self._end_replay(one)
            elif one.replay is None and one.events in ready:
                self._take_live(one)

    def _reconcile(self) -> None:
        wanted = self._wanted
        for source in [source for source in self._followed if source not in wanted]:
            self._drop(source)
        for source in sorted(wanted - self._followed.keys()):
            try:
                self._add(source)
            except zmq.ZMQError as error:
                logger.error("KV events of %s cannot be followed at %s: %s", source, source.endpoint, error.strerror)

    def _socket(self, kind: int, address: str, waiting: int) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(zmq.RCVHWM, waiting)
        made.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, ":" in host_of(address))
        if self._server_key is not None:
            public, secret = zmq.curve_keypair()
            made.setsockopt(zmq.CURVE_SERVERKEY, self._server_key)
            made.setsockopt(zmq.CURVE_PUBLICKEY, public)
            made.setsockopt(zmq.CURVE_SECRETKEY, secret)
        return made

    def _add(self, source: KVSource) -> None:
        events = self._socket(zmq.SUB, source.endpoint, _WAITING)
        monitor = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            events.subscribe(b"")
            events.connect(source.endpoint)
        except BaseException:
            _close(events, monitor)
            raise
        self._followed[source] = _Followed(source, events, monitor)
        self._poller.register(events, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _drop(self, source: KVSource) -> None:
        one = self._followed.pop(source)
        self._stop_replay(one)
        self._poller.unregister(one.monitor)
        if one.events in self._poller:
            self._poller.unregister(one.events)
        _close(one.events, one.monitor)
        self._tell(one, KVCleared())

    def _watch(self, one: _Followed) -> None:
        """Follows connections: a server that has gone is forgotten, one that is there is asked for all it has."""
        event = recv_monitor_message(one.monitor)["event"]
        if event == zmq.EVENT_DISCONNECTED:
            self._stop_replay(one)
            one.begin()
            self._tell(one, KVCleared())
        elif one.expected == 0 and one.replay is None:
            logger.info("KV events of %s are followed at %s", one.source, one.source.endpoint)
            self._ask_replay(one, None)

    def _ask_replay(self, one: _Followed, held: tuple[int, bytes] | None) -> bool:
        """Asks for the batches from the expected one on, for which `held` waits; False where nobody can be asked."""
        address = one.source.replay_endpoint
        if address is None:
            return False
        replay = self._socket(zmq.DEALER, address, _REPLAY_WAITING)
        try:
            replay.connect(address)
            replay.send_multipart((b"", one.expected.to_bytes(8, "big")), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            replay.close(0)
            if not one.warned:
                logger.error("%s cannot be asked for batches at %s: %s", one.source, address, error.strerror)
            one.warned = True
            return False
        one.replay, one.held, one.num_replayed = replay, held, 0
        one.deadline = time.monotonic() + _REPLAY_SECONDS
        self._poller.register(one.replay, zmq.POLLIN)
        self._poller.unregister(one.events)
        return True

    def _stop_replay(self, one: _Followed) -> None:
        if one.replay is not None:
            self._poller.unregister(one.replay)
            one.replay.close(0)
            one.replay, one.held = None, None
            self._poller.register(one.events, zmq.POLLIN)

    def _end_replay(self, one: _Followed) -> None:
        held = one.held
        self._stop_replay(one)
        if held is not None:
            self._apply(one, *held)

    def _take_replayed(self, one: _Followed) -> None:
        for _ in range(_IN_A_ROW):
            frames = _frames(one.replay)
            if frames is None:
                break
            one.num_replayed += 1
            is_batch = len(frames) == 3 and len(frames[1]) == 8 and frames[1] != END
            if not is_batch or one.num_replayed > _MOST_REPLAYED:
                self._end_replay(one)
                break
            self._apply(one, int.from_bytes(frames[1], "big"), frames[2])
        time.sleep(_PAUSE_SECONDS)

    def _take_live(self, one: _Followed) -> None:
        for _ in range(_IN_A_ROW):
            frames = _frames(one.events)
            if frames is None:
                break
            if len(frames) != 3 or len(frames[1]) != 8:
                self._unreadable(one, "a message is not a topic, a number of 8 bytes and a batch")
                continue
            number = int.from_bytes(frames[1], "big")
            if one.last is not None and number <= one.last:  # another engine publishes there
                one.begin()
                self._tell(one, KVCleared())
            one.last = number
            if number > one.expected and self._ask_replay(one, (number, frames[2])):
                return
            self._apply(one, number, frames[2])
        time.sleep(_PAUSE_SECONDS)

    def _apply(self, one: _Followed, number: int, payload: bytes) -> None:
        """Tells of a batch, once; where some are missing before it, what is known is forgotten."""
        if number < one.expected:
            return
        if number > one.expected > 0:
            logger.warning(
                "batches %d to %d of %s are missing: its blocks are forgotten", one.expected, number - 1, one.source
            )
        if number > one.expected:
            self._tell(one, KVCleared())
        one.expected = number + 1
        try:
            changes = one.reader.read(payload)
        except ValueError as error:
            self._unreadable(one, str(error))
            return
        for change in changes:
            self._tell(one, change)

    def _unreadable(self, one: _Followed, problem: str) -> None:
        if not one.warned:
            logger.warning("KV events of %s cannot be read, and its blocks are forgotten: %s", one.source, problem)
        one.warned = True
        self._tell(one, KVCleared())

    def _tell(self, one: _Followed, change: KVChange) -> None:
        try:
            self._changed(one.source.url, one.source.rank, change)
        except Exception:  # of a plugin, which may raise anything
            if not one.warned:
                logger.exception("the listener of KV events has failed")
            one.warned = True


def _close(events: Any, monitor: Any) -> None:
    events.disable_monitor()
    monitor.close(0)
    events.close(0)


def _frames(made: Any) -> list[bytes] | None:
    """The frames of a message, of which those after the fourth are dropped; None where none has come."""
    try:
        frames = [made.recv(zmq.NOBLOCK)]
        while made.getsockopt(zmq.RCVMORE):
            frame = made.recv(zmq.NOBLOCK)
            if len(frames) < 4:
                frames.append(frame)
    except zmq.Again:
        return None
    return frames
