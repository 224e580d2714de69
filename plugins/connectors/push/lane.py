"""The way to one worker of another engine: a thread, a connection, and what is told and sent on it. No step waits.

What blocks follow is said at once, so that the other side has made room when they are computed; the rest of what is
done for a parcel is done in order. One for which there is no room yet waits, and is asked for again.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from frame.interfaces import Mark
from frame.quoting import printable

from ..blocks.callers import hang_up, is_over, shut_down, stop_hearing
from ..blocks.wire import PeerError
from ..nixl.wire import Channel
from .carrier import Carrier, Staged
from .line import Line
from .parcels import Batch, Notes, Parcel
from .wire import Begin, Drop, End, Full, Have, Meet, No, Part, Ready, Written, connect

logger = logging.getLogger("frame.connectors.push")

#: Different reasons of which the log tells why nothing goes there.
_MAX_TOLD = 64
#: Seconds after which an idle lane looks whether the other side is still there, whose memory it keeps mapped.
_WATCH_SECONDS = 1.0
#: Seconds between looks whether copies are done, and between questions for room.
_POLL_SECONDS, _ROOM_SECONDS = 0.0005, 0.005
#: Seconds after which the other side is told of what is written, though more follows: so it knows that more comes.
_TELL_SECONDS = 0.2
#: Pieces of which one message tells.
_MAX_PARTS = 4096


class Lane:
    """To the worker of this rank in the engine at `place`; the connection is made when first needed.

    Only the worker's thread calls it, and waits for nothing but in `join`; see `Lanes` for what is done for a parcel.
    """

    def __init__(
        self,
        place: tuple[str, int],
        *,
        carrier: Carrier,
        secret: bytes,
        meet: Meet,
        timeout: float,
        retry: float,
        patience: float,
        checksums: bool,
        notes: Notes,
    ) -> None:
        self._place = place
        self._carrier = self._way = carrier
        self._secret = secret
        self._meet = meet
        self._timeout = timeout
        self._retry = retry
        self._patience = patience
        self._checksums = checksums
        self._notes = notes
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_jobs = self._num_done = 0  # counted by the worker's thread and by this lane's
        self._connection: socket.socket | None = None
        self._channel: Channel | None = None
        self._open: set[Parcel] = set()  # that the other side was told of
        self._line = Line()
        self._waiting: deque[tuple[Parcel, float]] = deque()  # for room, until when
        self._asks_at = 0.0
        self._rests_until = 0.0
        self._told: set[str] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="push-lane", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is sent or waits to be sent."""
        # in this order: a job that is done has changed what is open before, and what waits may be asked for meanwhile
        if self._waiting or self._num_done != self._num_jobs:
            return False
        return not (self._open or self._line or self._waiting)

    def begin(self, parcel: Parcel) -> None:
        """Tells the other side that blocks follow."""
        self._give(partial(self._begin_soon, parcel))

    def send(self, parcel: Parcel, staged: Staged) -> None:
        """Sends blocks once they are copied, and gives their memory back."""
        self._put(parcel, staged.mark, partial(self._send, parcel, staged))

    def written(self, batch: Batch) -> None:
        """Tells the other side of blocks once they are written."""
        self._give(partial(self._note_soon, batch))

    def look(self) -> None:
        """Looks whether the other side is gone."""
        self._give(self._watch)

    def finish(self, parcel: Parcel) -> None:
        """All blocks were given to `send` or `written`."""
        self._put(parcel, None, partial(self._end, parcel))

    def drop(self, parcel: Parcel) -> None:
        """The blocks are worth nothing, or some cannot be sent."""
        self._put(parcel, None, partial(self._drop, parcel))

    @property
    def lives(self) -> bool:
        """Whether its thread does."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Hangs up, and has the thread end."""
        self._closed = True
        self._jobs.put(None)
        connection = self._connection
        if connection is not None:
            # the thread closes it; who is written to may not take it for gone before the last write has ended
            (stop_hearing if self._way.maps else shut_down)(connection)

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def _give(self, job: Callable[[], None]) -> None:
        self._num_jobs += 1
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            self._line.work_off()
            if self._waiting and time.monotonic() > self._asks_at:
                self._num_done -= 1  # this is one more job
                oldest, until = self._waiting.popleft()
                self._begin(oldest, until)
                if self._waiting and self._waiting[-1][0] is oldest:
                    self._waiting.rotate()
                self._num_done += 1
                self._asks_at = time.monotonic() + _ROOM_SECONDS
            try:
                job = self._jobs.get(timeout=self._pause())
            except queue.Empty:
                if not self._line and not self._waiting:
                    self._watch()
                continue
            if job is None:
                break
            job()
            self._num_done += 1
        self._lose()
        self._line.finish()

    def _put(self, parcel: Parcel, mark: Mark | None, work: Callable[[], None]) -> None:
        self._give(partial(self._line.add, [parcel], mark, work))

    def _note_soon(self, batch: Batch) -> None:
        self._line.add((run.parcel for run in batch.runs), batch.mark, partial(self._note_written, batch))

    def _pause(self) -> float | None:
        """How long nothing but what a step gives can be done."""
        if self._line:
            return _POLL_SECONDS
        if self._waiting:
            return _ROOM_SECONDS
        return _WATCH_SECONDS if self._way.maps else None

    def _watch(self) -> None:
        if self._connection is not None and is_over(self._connection):
            self._lose()

    def _begin_soon(self, parcel: Parcel) -> None:
        until = time.monotonic() + self._patience
        if any(one.goal.digest == parcel.goal.digest for one, _ in self._waiting):
            self._waiting.append((parcel, until))
        elif same := [one for one in self._open if one.goal.digest == parcel.goal.digest]:
            # once these were dropped or have ended, if they are to
            self._line.add([parcel, *same], None, partial(self._begin, parcel, until))
        else:
            self._begin(parcel, until)

    def _begin(self, parcel: Parcel, until: float) -> None:
        """Also of one that was dropped meanwhile: who waits for it must hear that it does not come."""
        waits = time.monotonic() < until
        try:
            kept = self._channel is not None
            try:
                answer = self._ask(parcel, waits)
            except PeerError:
                if not kept:
                    raise
                answer = self._ask(parcel, waits)  # the connection that was kept had ended meanwhile
        except PeerError as error:
            self._tell(str(error))
            self._notes.fail(parcel)
            parcel.answered = True
            return
        if isinstance(answer, Full):
            self._waiting.append((parcel, until))
            return
        self._take_answer(parcel, answer)
        with parcel.lock:
            for write in parcel.late:
                if (batch := write()) is not None:  # before a later word of the step's, such as that it is dropped
                    self._note_soon(batch)
            parcel.late = []
            parcel.answered = True

    def _take_answer(self, parcel: Parcel, answer: Ready | Have | No) -> None:
        if isinstance(answer, No):
            self._tell(answer.reason)
            self._notes.fail(parcel)
        elif isinstance(answer, Have):
            parcel.over = True
        else:
            parcel.begun, parcel.ready = self._channel, answer
            parcel.way = self._way if self._way.writes(answer) else None
            parcel.told = time.monotonic()
            self._open.add(parcel)

    def _ask(self, parcel: Parcel, waits: bool) -> Ready | Have | No | Full:
        if self._closed or (self._channel is None and time.monotonic() < self._rests_until):
            raise PeerError("it failed less than retry_seconds ago, and is not tried before")
        kept = self._channel is not None
        try:
            if self._channel is None:
                self._connection, self._channel = connect(self._place, self._secret, self._meet, self._timeout)
                if self._closed:  # between the check and now, so that it found no connection to end
                    raise PeerError("it was closed")
                place = "{}:{}".format(*self._place)
                self._way = self._carrier.meet(self._connection, self._channel, place, self._timeout)
                self._told.clear()
            begin = Begin(parcel.goal.digest, parcel.goal.num_tokens, waits and self._way.maps)
            self._channel.send(begin, self._timeout)
            answer: Ready | Have | No | Full = self._channel.receive(Ready | Have | No | Full, self._timeout)
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

    def _note_written(self, batch: Batch) -> None:
        try:
            batch.mark.wait()
            if batch.error is not None:
                raise batch.error
            live = [run for run in batch.runs if not run.parcel.over and run.parcel.begun is self._channel]
            for run in live:
                run.parcel.written.append((run.layer, run.first, len(run.blocks)))
            num_bytes = sum(len(run.blocks) * run.width for run in live)
            self._notes.sent(num_bytes, batch.seconds() if live else 0.0, direct=True)
            for parcel in {run.parcel for run in live}:
                if time.monotonic() > parcel.told + _TELL_SECONDS:
                    self._tell_written(parcel)
        except Exception as error:  # of the connection, or of the device
            logger.debug("blocks could not be written: %s", error)
            self._broken(error)
            for run in batch.runs:
                self._notes.fail(run.parcel)

    def _tell_written(self, parcel: Parcel) -> None:
        parts, parcel.written, parcel.told = parcel.written, [], time.monotonic()
        if self._channel is not None:
            for start in range(0, len(parts), _MAX_PARTS):
                self._channel.send(Written(parcel.goal.digest, parts[start : start + _MAX_PARTS]), self._timeout)

    def _end(self, parcel: Parcel) -> None:
        self._say(parcel, End(parcel.goal.digest))

    def _drop(self, parcel: Parcel) -> None:
        if any(one is parcel for one, _ in self._waiting):
            self._waiting = deque(one for one in self._waiting if one[0] is not parcel)
            others = (*self._open, *(one for one, _ in self._waiting))
            if all(one.goal.digest != parcel.goal.digest for one in others):
                self._open.add(parcel)  # the other side knows that it was to come
            parcel.answered = True
        self._say(parcel, Drop(parcel.goal.digest), although_over=True)

    def _say(self, parcel: Parcel, message: End | Drop, *, although_over: bool = False) -> None:
        known = parcel in self._open
        if known and isinstance(message, End) and self._connection is not None and is_over(self._connection):
            self._broken(PeerError("the connection was closed"))
        self._open.discard(parcel)
        if not known or self._channel is None or (parcel.over and not although_over):
            return
        parcel.over = True
        try:
            if isinstance(message, End):
                self._tell_written(parcel)
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
        for parcel in (*self._open, *(parcel for parcel, _ in self._waiting)):
            self._notes.fail(parcel)
            parcel.answered = True
        self._open.clear()
        self._waiting.clear()
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
            host, port = self._place
            logger.warning("no KV blocks go to the engine at %s:%d: %s", printable(host), port, reason)
