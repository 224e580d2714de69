"""Stores units of prompts at an LMCache server and fetches them, for one worker. Knows no step and no block of a cache.

A unit's bytes are divided evenly over its chunks' objects. An object counts when its header and its checksum say that
it is this part of this unit; what is wrong, or not there, is not fetched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from .lookup import RENEW_SECONDS, key_of, new_instance, new_session, register
from .messages import Geometry, Prompt
from .options import LMCacheOptions
from .pool import HEADER, SharedPool
from .wire import Client, Key, LMCacheError, PreparedRetrieve, PreparedStore, Slot

logger = logging.getLogger("frame.connectors.lmcache")

#: A server keeps what it reserved for ten minutes, unless told otherwise, and gives it to others then: frame writes
#: within this many seconds of its question, or not at all.
WRITE_SECONDS = 30.0


class Transfers:
    """One thread's connection to the server, and the server's memory. Methods but `close` are of that thread.

    `worker` is this worker's number among those of the engine.
    """

    def __init__(self, options: LMCacheOptions, worker: int) -> None:
        self._client = Client(options.address(), timeout=options.timeout_seconds, retry=options.retry_seconds)
        self._worker = worker
        self._instance = 0
        self._pool: SharedPool | None = None
        self._known: Geometry | None = None
        self._renewed = -float("inf")

    @property
    def resting(self) -> bool:
        """Whether the server failed a moment ago and is not asked now."""
        return self._client.resting

    def store(self, prompt: Prompt, geometry: Geometry, first: int, units: Sequence[np.ndarray]) -> bool:
        """Stores consecutive units, each uint8 [n], from number `first` on; False when the server did not take them."""
        try:
            pool = self._registered(geometry)
            session = new_session()
            key = self._key(prompt, geometry, session, first, len(units))
            asked = time.monotonic()
            slots = self._client.call("prepare_store", key, self._instance, answer=PreparedStore).context
            places = _checked(pool, geometry, slots.slots)
            wanted = slots.chunk_indices
            if len(wanted) != len(places) or any(not 0 <= place < len(units) * geometry.chunks for place in wanted):
                raise LMCacheError("it has places for other chunks than those that were named")
            if not places:  # it has them all
                self._client.call("end_session", session, answer=type(None))
                return True
            for place, slot in zip(wanted, places, strict=True):
                unit, part = divmod(place, geometry.chunks)
                data = _part(units[unit], geometry, part)
                if time.monotonic() > asked + WRITE_SECONDS or not pool.write(
                    slot.offset, self._owner(prompt, geometry, first + unit, part), data
                ):
                    raise LMCacheError("its memory could not be written")
            taken = self._client.call("commit_store", key, self._instance, b"", answer=bool)
            self._client.call("end_session", session, answer=type(None))
        except LMCacheError as error:
            self._fail(error)
            return False
        return taken

    def fetch(self, prompt: Prompt, geometry: Geometry, first: int, units: Sequence[np.ndarray]) -> list[bool]:
        """Fills consecutive units, each uint8 [n], from number `first` on, that a lookup has found; which are sound."""
        try:
            pool = self._registered(geometry)
            key = self._key(prompt, geometry, prompt.session, first, len(units))
            found = self._client.call("prepare_retrieve", key, self._instance, answer=PreparedRetrieve)
            if not found.success:
                return [False] * len(units)
            places = _checked(pool, geometry, found.context.slots)
            if len(places) != len(units) * geometry.chunks:
                raise LMCacheError(f"it has {len(places)} objects for {len(units) * geometry.chunks} chunks")
            sound = [
                all(
                    pool.read(
                        places[unit * geometry.chunks + part].offset,
                        self._owner(prompt, geometry, first + unit, part),
                        _part(data, geometry, part),
                    )
                    for part in range(geometry.chunks)
                )
                for unit, data in enumerate(units)
            ]
            self._client.call("commit_retrieve", key, self._instance, answer=bool)
        except LMCacheError as error:
            self._fail(error)
            return [False] * len(units)
        if not all(sound):
            logger.warning("the LMCache server has other bytes than were stored for %d units", sound.count(False))
        return sound

    def skip(self, prompt: Prompt, geometry: Geometry, first: int, count: int) -> None:
        """Gives back units that a lookup has found and that this worker does not fetch."""
        if self.resting:
            return
        try:
            key = self._key(prompt, geometry, prompt.session, first, count)
            self._client.call("free_lookup_locks", key, geometry.world, answer=type(None))
        except LMCacheError as error:
            self._fail(error)

    def close(self) -> None:
        """Takes leave of the server, once the thread has ended."""
        if self._known is not None and not self.resting:
            try:
                self._client.call("unregister_kv_cache_engine_driven_context", self._instance, answer=type(None))
            except LMCacheError as error:
                self._fail(error)
        self._client.close()
        self._forget()

    def _registered(self, geometry: Geometry) -> SharedPool:
        """The server's memory, once it knows of this worker. Raises `LMCacheError`."""
        pool = self._pool
        if pool is not None and geometry == self._known and time.monotonic() < self._renewed + RENEW_SECONDS:
            return pool
        if geometry != self._known:
            self._forget()
            self._instance = new_instance()
        answer = register(self._client, geometry, self._instance)
        try:
            made = SharedPool(answer.shm_name, answer.pool_size)
        except ValueError as error:
            raise LMCacheError(f"{error}; see the connector's page for how to start the server") from None
        self._forget()
        self._pool, self._known, self._renewed = made, geometry, time.monotonic()
        return made

    def _fail(self, error: LMCacheError) -> None:
        self._client.fail(error)
        self._forget()

    def _forget(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = self._known = None

    def _key(self, prompt: Prompt, geometry: Geometry, session: str, first: int, count: int) -> Key:
        unit = geometry.unit
        return key_of(prompt, geometry, session, first * unit, (first + count) * unit, self._worker)

    def _owner(self, prompt: Prompt, geometry: Geometry, unit: int, part: int) -> bytes:
        """Ties an object to its place, so that one that lies elsewhere is not taken for another."""
        return b"%s %d %d %s" % (geometry.model.encode(), self._worker, part, prompt.units[unit])


def _checked(pool: SharedPool, geometry: Geometry, slots: Sequence[Slot] | None) -> Sequence[Slot]:
    if slots is None:
        raise LMCacheError("it names no shared memory for objects")
    for slot in slots:
        sound = slot.length == geometry.object_bytes and slot.dtype == "uint8" and pool.fits(slot.offset, slot.length)
        if not sound:
            raise LMCacheError(f"it names {slot.length} bytes of {slot.dtype:.20} at {slot.offset} for an object")
    return slots


def _part(unit: np.ndarray, geometry: Geometry, part: int) -> np.ndarray:
    size = geometry.object_bytes - HEADER.size
    return unit[part * size : (part + 1) * size]
