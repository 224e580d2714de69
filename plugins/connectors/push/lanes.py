"""Sends blocks to other engines' workers: a lane for each of them, and for no more than some at a time.

Knows neither a connection nor a device.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial

from frame.quoting import printable

from .carrier import Carrier, Staged
from .facts import Facts
from .lane import Lane
from .parcels import Batch, Notes, Outcome, Parcel
from .wire import Meet

logger = logging.getLogger("frame.connectors.push")

#: Other engines at a time. For a further one the one unused for longest goes; while blocks go to all, it gets none.
_MAX_LANES = 64
#: Engines of which the log tells that they get none.
_MAX_TOLD = 64


class Lanes:
    """A lane for each worker of another engine. Arenas get the memory of what was sent back.

    A prompt waits at most `patience` seconds for room in memory to which it can be written.
    """

    def __init__(
        self,
        carrier: Carrier,
        secret: bytes,
        facts: Facts,
        rank: int,
        *,
        timeout: float,
        retry: float,
        patience: float = 15.0,
        checksums: bool = True,
    ) -> None:
        #: whether it is known of a parcel only when it is `answered` whether its blocks are written
        self.may_write = carrier.may_write
        self._make = partial(
            Lane,
            carrier=carrier,
            secret=secret,
            meet=Meet(facts, rank),
            timeout=timeout,
            retry=retry,
            patience=patience,
            checksums=checksums,
        )
        self._lanes: OrderedDict[tuple[str, int], Lane] = OrderedDict()
        self._ended: list[Lane] = []
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
                    printable(place[0]),
                    place[1],
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

    def written(self, batch: Batch) -> None:
        """Tells the other side of blocks once they are written."""
        if (lane := self._lanes.get(_place(batch.runs[0].parcel))) is not None:
            lane.written(batch)

    def look(self, parcel: Parcel) -> None:
        """Looks whether the other side is gone."""
        if (lane := self._lanes.get(_place(parcel))) is not None:
            lane.look()

    def end(self, parcel: Parcel) -> None:
        """All blocks were given to `send` or `written`."""
        if (lane := self._lanes.get(_place(parcel))) is not None:
            lane.finish(parcel)

    def drop(self, parcel: Parcel) -> None:
        """The blocks are worth nothing, or some cannot be sent."""
        parcel.over = True
        if (lane := self._lanes.get(_place(parcel))) is not None:
            lane.drop(parcel)

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
