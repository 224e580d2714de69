"""Large objects in shared memory: one writer puts them, N readers of the same host take them. Media will be its user.

The memory is a ring: objects lie one behind the other, the oldest makes room first, and one that does not fit before
the end of the memory begins at its start. `put` and `touch` hand an object out: each reader is then to take it once, by
`get`, `borrow` or `skip`, and until all have done so it is held and stays. Counts are the references: in front of an
object stands how often each reader has taken it, written by that reader alone, so that no lock is shared and none can
stay taken by a process that was killed; how often it was handed out is known to the writer.

    [id 8 bytes][size 8 bytes][4 bytes for each reader: how often taken], then the bytes, at a multiple of 64

What an object is (array type and shape) travels in its `StoredObject`, as a typed message. Its id says whether the
place still holds it. Ids begin at a random number, so that bytes of an object cannot pass for one; an object that is
evicted loses its id before anything is written over it. Nothing is unpickled. Knows no request and no model.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from frame.core.interfaces.wire import check_dtype
from frame.core.processes.shared_memory import make_fence, make_memory

_ALIGNMENT = 64
_COUNT_LIMIT = 1 << 32


class StoreFullError(MemoryError):
    """There is no room, since the oldest object is held by readers."""


class StaleObjectError(LookupError):
    """The object has made room for others."""


class StoredObject(msgspec.Struct, frozen=True):
    """Where an object lies, for messages to readers; `dtype` is empty for bytes, else of an array of `shape`."""

    offset: int
    id: int
    num_bytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass
class _Entry:
    """An object as the writer knows it; `end` is where the next one may begin."""

    key: str
    stored: StoredObject
    end: int
    handed_out: int


class _Memory:
    """The mapped memory, as both sides address it."""

    def __init__(self, memory: int, num_bytes: int, num_readers: int) -> None:
        self.num_bytes = num_bytes
        self.num_readers = num_readers
        self.header_bytes = _aligned(16 + 4 * num_readers)
        self.map = mmap.mmap(memory, num_bytes)
        self.bytes = memoryview(self.map)
        self.ids = self.bytes.cast("Q")  # stored and loaded whole, unlike what `struct` packs
        self.counts = self.bytes.cast("I")
        self.fence = make_fence()

    def payload(self, stored: StoredObject) -> memoryview:
        start = stored.offset + self.header_bytes
        return self.bytes[start : start + stored.num_bytes]

    def count_at(self, offset: int, reader: int) -> int:
        """Where in `counts` it stands how often `reader` has taken the object at `offset`."""
        return (offset + 16) // 4 + reader

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # somebody kept a view; the memory ends with the process then
            for view in (self.ids, self.counts, self.bytes):
                view.release()
            self.map.close()


class ObjectStore:
    """The writer's side, used by one thread at a time. `num_bytes` is the size of the memory, a multiple of 64.

    Its memory is the open file `memory`, which readers are given.
    """

    def __init__(self, num_bytes: int, num_readers: int) -> None:
        if num_bytes < _ALIGNMENT or num_bytes % _ALIGNMENT or num_readers < 1:
            raise ValueError(
                f"an object store has a multiple of {_ALIGNMENT} bytes and a reader, unlike {num_bytes} bytes for "
                f"{num_readers} readers"
            )
        self.memory = make_memory("frame-objects", num_bytes)
        self._memory = _Memory(self.memory, num_bytes, num_readers)
        self._entries: dict[str, _Entry] = {}  # the oldest first
        self._end = 0  # of the newest object
        self._next_id = secrets.randbits(62) + 1

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def put(self, key: str, value: np.ndarray | bytes) -> StoredObject:
        """Copies an object into the memory and hands it out once; what is oldest and not held makes room.

        Raises `ValueError` for a key that is there already (`touch` hands it out again), for an object that no empty
        store could take and for an array of another type than numbers; `StoreFullError` when what would have to make
        room is held.
        """
        if key in self._entries:
            raise ValueError(f"the object store holds {key!r} already; touch it to hand it out again")
        dtype, shape = "", ()
        data: memoryview | bytes = bytes(value) if isinstance(value, bytes | bytearray) else b""
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
            dtype, shape = check_dtype(array.dtype.str), value.shape
            data = array.reshape(-1).view(np.uint8).data
        elif not isinstance(value, bytes | bytearray):
            raise ValueError(f"an object store takes arrays and bytes, not {type(value).__name__}")
        offset, end = self._make_room(key, len(data))
        stored = StoredObject(offset, self._next_id, len(data), dtype, shape)
        memory = self._memory
        memory.payload(stored)[:] = data
        for reader in range(memory.num_readers):
            memory.counts[memory.count_at(offset, reader)] = 0
        memory.ids[offset // 8 + 1] = len(data)
        memory.fence()  # everything is there before the id says so
        memory.ids[offset // 8] = stored.id
        self._next_id += 1
        self._entries[key] = _Entry(key, stored, end, 1)
        self._end = end
        return stored

    def touch(self, key: str) -> StoredObject:
        """Hands an object out once more; raises `KeyError` for one that is not there any more."""
        entry = self._entries[key]
        entry.handed_out = (entry.handed_out + 1) % _COUNT_LIMIT
        return entry.stored

    def holders(self, key: str) -> list[int]:
        """The readers that have not taken an object as often as it was handed out."""
        return self._holders(self._entries[key])

    def close(self) -> None:
        """Closes the memory on this side; readers keep what they have mapped. May be called twice."""
        if self.memory >= 0:
            self._memory.close()
            os.close(self.memory)
            self.memory = -1

    def _holders(self, entry: _Entry) -> list[int]:
        counts, at = self._memory.counts, self._memory.count_at(entry.stored.offset, 0)
        return [reader for reader in range(self._memory.num_readers) if counts[at + reader] != entry.handed_out]

    def _make_room(self, key: str, num_bytes: int) -> tuple[int, int]:
        """Where an object of `num_bytes` begins and ends, once others have made room."""
        needed = _aligned(self._memory.header_bytes + num_bytes)
        if needed > self._memory.num_bytes:
            most = self._memory.num_bytes - self._memory.header_bytes
            raise ValueError(f"object {key!r} of {num_bytes} bytes is too large for a store of at most {most}")
        while (offset := self._gap(needed)) is None:
            oldest = next(iter(self._entries.values()))
            if holders := self._holders(oldest):
                raise StoreFullError(
                    f"the object store has no room for {num_bytes} bytes of {key!r}: readers {holders} hold the oldest "
                    f"of its {len(self._entries)} objects, {oldest.key!r}"
                )
            del self._entries[oldest.key]
            self._memory.ids[oldest.stored.offset // 8] = 0
        self._memory.fence()  # ids are gone, and readers have finished, before anything is written over
        return offset, offset + needed

    def _gap(self, needed: int) -> int | None:
        """Where `needed` bytes are free behind the newest object, or at the start; None where they are not."""
        if not self._entries:
            return 0
        oldest = next(iter(self._entries.values())).stored.offset
        if self._end <= oldest:  # the newest lie before the oldest; equal: all is full
            return self._end if self._end + needed <= oldest else None
        if self._end + needed <= self._memory.num_bytes:
            return self._end
        return 0 if needed <= oldest else None


class ObjectReader:
    """Reader number `reader` of a store's memory, an open file that it takes over; used by one thread."""

    def __init__(self, memory: int, num_readers: int, reader: int) -> None:
        try:
            if not 0 <= reader < num_readers:
                raise ValueError(f"there is no reader {reader} of {num_readers}")
            self._memory = _Memory(memory, os.fstat(memory).st_size, num_readers)
        finally:
            os.close(memory)
        self._reader = reader

    def get(self, stored: StoredObject) -> np.ndarray | bytes:
        """Takes a copy of an object. Raises `StaleObjectError` when it is gone."""
        with self.borrow(stored) as found:
            taken = found.copy() if isinstance(found, np.ndarray) else bytes(found)
            self._check(stored)
        return taken

    @contextlib.contextmanager
    def borrow(self, stored: StoredObject) -> Iterator[np.ndarray | memoryview]:
        """Takes an object: a read-only view, which may be used until the context ends, also by an exception.

        Raises `StaleObjectError` when it is gone, and `ValueError` for what no store can have handed out.
        """
        self._check(stored)
        data = self._memory.payload(stored).toreadonly()
        try:
            yield np.frombuffer(data, np.dtype(stored.dtype)).reshape(stored.shape) if stored.dtype else data
        finally:
            self.skip(stored)

    def skip(self, stored: StoredObject) -> None:
        """Takes an object without looking at it, so that it need not stay for this reader."""
        if self._holds(stored):
            self._memory.fence()  # it is read before the count says so
            at = self._memory.count_at(stored.offset, self._reader)
            self._memory.counts[at] = (self._memory.counts[at] + 1) % _COUNT_LIMIT

    def close(self) -> None:
        """Unmaps the memory. May be called twice."""
        self._memory.close()

    def _holds(self, stored: StoredObject) -> bool:
        memory = self._memory
        room = memory.num_bytes - memory.header_bytes - stored.num_bytes
        if stored.offset % _ALIGNMENT or not 0 <= stored.offset <= room or stored.num_bytes < 0:
            raise ValueError(f"no object of {stored.num_bytes} bytes lies at {stored.offset} of {memory.num_bytes}")
        memory.fence()
        found = memory.ids[stored.offset // 8] == stored.id and memory.ids[stored.offset // 8 + 1] == stored.num_bytes
        memory.fence()
        return found

    def _check(self, stored: StoredObject) -> None:
        if stored.dtype:
            size = np.dtype(check_dtype(stored.dtype)).itemsize * math.prod(stored.shape)
            if size != stored.num_bytes or min(stored.shape, default=0) < 0:
                raise ValueError(f"{stored.num_bytes} bytes are no {stored.dtype} of shape {list(stored.shape)}")
        if not self._holds(stored):
            raise StaleObjectError(f"object {stored.id} is not in the store any more; it must be put there again")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
