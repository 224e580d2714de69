"""Sends blocks to other engines' workers: one connection and one thread for each. No step waits for them.

Knows no device but by the marks behind which copies are done.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from ..blocks.callers import hang_up, is_over, stop_hearing
from ..blocks.wire import PeerError
from ..nixl.wire import Channel
from .carrier import Carrier, Staged
from .facts import Facts
from .parcels import Notes, Outcome, Parcel
from .wire import Begin, Drop, End, Have, Meet, No, Part, Ready, connect

logger = logging.getLogger("frame.connectors.push")

#: Other engines at a time. For a further one the one unused for longest goes; while blocks go to all, it gets none.
_MAX_LANES = 64
_MAX_TOLD = 64
#: Seconds after which an idle lane looks whether the other side is still there, whose memory it keeps mapped.
_WATCH_SECONDS = 1.0


class Lanes:
    """A lane for each worker of another engine. Arenas get the memory of what was sent back."""

    def __init__(
        self,
        carrier: Carrier,
        secret: bytes,
        facts: Facts,
        rank: int,
        *,
        timeout: float,
        retry: float,
        checksums: bool = True,
    ) -> None:
        self._make = partial(
            _Lane,
            carrier=carrier,
            secret=secret,
            meet=Meet(facts, rank),
            timeout=timeout,
            retry=retry,
            checksums=checksums,
        )
        self._lanes: OrderedDict[tuple[str, int], _Lane] = OrderedDict()
        self._ended: list[_Lane] = []
        self._refused: set[tuple[str, int]] = set()  # to which nothing was sent, as the log says
        self._notes = Notes()

    def begin(self, parcel: Parcel) -> None:
        """Tells the other side that blocks follow; where too many others are sent to, nothing is sent."""
        place = _place(parcel)
        if place not in self._lanes and not self._open(place):
            self._notes.fail(parcel)
            if place not in self._refused and len(self._refused) < _MAX_TOLD:
                self._refused.add(place)
                logger.warning(
                    "no KV blocks go to the engine at %s:%d: they go to %d others, no more at a time",
                    *place,
                    _MAX_LANES,
                )
            return
        self._lanes.move_to_end(place)
        self._lanes[place].begin(parcel)

    def send(self, parcel: Parcel, staged: Staged) -> None:
        """Sends blocks of one that was begun, once they are copied; their memory is given back then.

        Where its lane has gone, because it had failed, any other does the latter.
        """
        lane = self._lanes.get(_place(parcel)) or next(iter(self._lanes.values()))
        lane.send(parcel, staged)

    def end(self, parcel: Parcel) -> None:
        """All blocks were given to `send`."""
        if (lane := self._lanes.get(_place(parcel))) is not None:
            lane.finish(parcel)

    def drop(self, parcel: Parcel) -> None:
        """The blocks are worth nothing, or some cannot be sent."""
        parcel.over = True
        if (lane := self._lanes.get(_place(parcel))) is not None:
            lane.drop(parcel)

    def from_device(self, parcel: Parcel) -> bool:
        """Whether its blocks are best sent from memory of the device."""
        lane = self._lanes.get(_place(parcel))
        return lane is not None and lane.from_device

    def take(self) -> Outcome:
        """What was done since the last call."""
        return self._notes.take()

    def close(self) -> None:
        """Ends all connections and threads."""
        for lane in (*self._lanes.values(), *self._ended):
            lane.end()
        for lane in (*self._lanes.values(), *self._ended):
            lane.join()

    def _open(self, place: tuple[str, int]) -> bool:
        """Makes a lane, which may take the room of an idle one; False where there is none."""
        self._ended = [lane for lane in self._ended if lane.lives]
        if len(self._lanes) >= _MAX_LANES:
            idle = next((one for one, lane in self._lanes.items() if lane.idle), None)
            if idle is None:
                return False
            self._ended.append(self._lanes.pop(idle))
            self._ended[-1].end()  # a step does not wait for it
        self._lanes[place] = self._make(place, notes=self._notes)
        return True


def _place(parcel: Parcel) -> tuple[str, int]:
    return parcel.goal.host, parcel.goal.port


class _Lane:
    """The connection to the worker of this rank in the engine at `place`, made when first needed."""

    def __init__(
        self,
        place: tuple[str, int],
        *,
        carrier: Carrier,
        secret: bytes,
        meet: Meet,
        timeout: float,
        retry: float,
        checksums: bool,
        notes: Notes,
    ) -> None:
        self._place = place
        self._carrier = self._way = carrier
        self._secret = secret
        self._meet = meet
        self._timeout = timeout
        self._retry = retry
        self._checksums = checksums
        self._notes = notes
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_jobs = self._num_done = 0  # counted by the worker's thread and by this lane's
        self._connection: socket.socket | None = None
        self._channel: Channel | None = None
        self._open: set[Parcel] = set()  # that the other side was told of
        self._rests_until = 0.0
        self._told: set[str] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="push-lane", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        # in this order: a job that is done has changed what is open before
        return self._num_done == self._num_jobs and not self._open

    def begin(self, parcel: Parcel) -> None:
        self._give(partial(self._begin, parcel))

    def send(self, parcel: Parcel, staged: Staged) -> None:
        self._give(partial(self._send, parcel, staged))

    def finish(self, parcel: Parcel) -> None:
        self._give(partial(self._end, parcel))

    def drop(self, parcel: Parcel) -> None:
        self._give(partial(self._drop, parcel))

    @property
    def from_device(self) -> bool:
        return self._way.from_device

    @property
    def lives(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Hangs up, and has the thread end."""
        self._closed = True
        self._jobs.put(None)
        connection = self._connection
        if connection is not None:
            # who is written to may not take it for gone before the last write has ended
            (stop_hearing if self._way.from_device else hang_up)(connection)

    def join(self) -> None:
        self._thread.join()

    def _give(self, job: Callable[[], None]) -> None:
        self._num_jobs += 1
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_WATCH_SECONDS if self._way.from_device else None)
            except queue.Empty:
                if self._connection is not None and is_over(self._connection):
                    self._lose()
                continue
            if job is None:
                break
            job()
            self._num_done += 1
        self._lose()

    def _begin(self, parcel: Parcel) -> None:
        """Also of one that was dropped meanwhile: who waits for it must hear that it does not come."""
        try:
            kept = self._channel is not None
            try:
                answer = self._ask(parcel)
            except PeerError:
                if not kept:
                    raise
                answer = self._ask(parcel)  # the connection that was kept had ended meanwhile
        except PeerError as error:
            self._tell(str(error))
            self._notes.fail(parcel)
            return
        if isinstance(answer, No):
            self._tell(answer.reason)
            self._notes.fail(parcel)
        elif isinstance(answer, Have):
            parcel.over = True
        else:
            parcel.begun, parcel.ready = self._channel, answer
            self._open.add(parcel)

    def _ask(self, parcel: Parcel) -> Ready | Have | No:
        if self._closed or (self._channel is None and time.monotonic() < self._rests_until):
            raise PeerError("nothing is tried for a while after a failure")
        kept = self._channel is not None
        try:
            if self._channel is None:
                self._connection, self._channel = connect(self._place, self._secret, self._meet, self._timeout)
                self._way = self._carrier.meet(self._channel, "{}:{}".format(*self._place), self._timeout)
                self._told.clear()
            self._channel.send(Begin(parcel.goal.digest, parcel.goal.num_tokens), self._timeout)
            answer: Ready | Have | No = self._channel.receive(Ready | Have | No, self._timeout)
        except PeerError:
            if not kept:  # one that was kept is made anew first
                self._rests_until = time.monotonic() + self._retry
            self._lose()
            raise
        return answer

    def _send(self, parcel: Parcel, staged: Staged) -> None:
        try:
            staged.mark.wait()
            ready, channel, connection = parcel.ready, self._channel, self._connection
            if parcel.over or ready is None or channel is None or connection is None or parcel.begun is not channel:
                return
            if staged.error is not None:
                self._notes.fail(parcel)
                self._drop(parcel)
                return
            checksum = self._way.checksum(staged, ready) if self._checksums else -1
            part = Part(parcel.goal.digest, staged.layer, staged.first, len(staged.memory), checksum)
            started = time.monotonic()
            self._way.send(connection, channel, part, staged, ready, self._timeout)
            self._notes.sent(staged.memory.numel(), time.monotonic() - started, direct=ready.session != "")
        except Exception as error:  # of the connection, or of the device
            self._broken(error)
            self._notes.fail(parcel)
        finally:
            staged.arena.give_back(staged.memory)

    def _end(self, parcel: Parcel) -> None:
        self._say(parcel, End(parcel.goal.digest))

    def _drop(self, parcel: Parcel) -> None:
        self._say(parcel, Drop(parcel.goal.digest), although_over=True)

    def _say(self, parcel: Parcel, message: End | Drop, *, although_over: bool = False) -> None:
        known = parcel in self._open
        self._open.discard(parcel)
        if not known or self._channel is None or (parcel.over and not although_over):
            return
        parcel.over = True
        try:
            self._channel.send(message, self._timeout)
        except PeerError as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        self._rests_until = time.monotonic() + self._retry
        if not self._closed:
            self._tell(str(error))
        self._lose()

    def _lose(self) -> None:
        """Without the connection nothing that was begun on it can be ended."""
        for parcel in self._open:
            self._notes.fail(parcel)
        self._open.clear()
        way, self._way = self._way, self._carrier
        if way is not self._carrier:
            way.leave()  # of which the other side must not hear before
        if self._connection is not None:
            hang_up(self._connection)
        self._connection = self._channel = None

    def _tell(self, reason: str) -> None:
        """Logs why nothing goes there, once until something does."""
        if reason not in self._told and len(self._told) < _MAX_TOLD and not self._closed:
            self._told.add(reason)
            logger.warning("no KV blocks go to the engine at %s:%d: %s", *self._place, reason)
