"""The file of a shelf that says what each slot holds: written by its engine alone, read by others and by the next one.

A slot's header is {state, length of the key, generation, when it was written and last used, key}. It says "writing"
before any worker writes the slot, and is published last; each time, its generation is another one. Numbers of slots
that are published go to a ring besides, so that others need not read all headers again. Knows no row's bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable

import numpy as np

from .index import Ledger
from .shelf import Shelf, open_file

MAGIC = b"frameSH1"
HEAD = struct.Struct("<8s16s16sQ")  # magic, shape of the shelf's content, identity of the workers' files, slots
COUNT = struct.Struct("<Q")
COUNT_AT, RING_AT, RING_SIZE = 64, 4096, 4096
SLOTS_AT = RING_AT + 4 * RING_SIZE
SLOT = struct.Struct("<IIQQQ40s")
MOST_KEY = 40
SLOTS = np.dtype(
    [("state", "<u4"), ("size", "<u4"), ("generation", "<u8"), ("made", "<u8"), ("used", "<u8"), ("key", "V40")]
)
FREE, WRITING, PUBLISHED = 0, 1, 2


class ShelfLedger(Ledger):
    """The index of this engine's shelf, which has `num_slots`.

    What is there is taken over where `shape` and `identity`, 16 bytes each, are those that it was made with. `kind` is
    as in `rows_file`.
    """

    def __init__(self, shelf: Shelf, shape: bytes, identity: bytes, num_slots: int, kind: str = "") -> None:
        file, head = index_file(kind), HEAD.pack(MAGIC, shape, identity, num_slots)
        size = SLOTS_AT + SLOT.size * num_slots
        descriptor = shelf.open(file, size)
        if descriptor is not None and os.pread(descriptor, HEAD.size, 0) != head:
            os.close(descriptor)
            descriptor = None
        if descriptor is None:
            descriptor = shelf.create(file, size)
            os.pwrite(descriptor, head, 0)
        self._memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self._count = COUNT.unpack_from(self._memory, COUNT_AT)[0]
        self._num_slots = num_slots

    def found(self) -> list[tuple[int, bytes]]:
        """(slot, key) of what is published, that used longest ago first. All else is free from now on."""
        slots = np.frombuffer(self._memory, SLOTS, self._num_slots, SLOTS_AT).copy()
        keys: dict[bytes, int] = {}
        for slot in np.argsort(slots["used"], kind="stable").tolist():
            one = slots[slot]
            if one["state"] == PUBLISHED and 0 < one["size"] <= MOST_KEY:
                keys[one["key"].tobytes()[: one["size"]]] = slot
        kept = set(keys.values())
        for slot in np.flatnonzero(slots["state"]).tolist():
            if slot not in kept:
                self.free(slot)
        return [(slot, key) for key, slot in keys.items()]

    def begin(self, slot: int, key: bytes) -> None:
        generation, now = self.generation(slot) + 1, time.time_ns()
        self.free(slot)
        SLOT.pack_into(self._memory, _at(slot), WRITING, len(key), generation, now, now, key)

    def publish(self, slot: int) -> None:
        struct.pack_into("<I", self._memory, _at(slot), PUBLISHED)
        struct.pack_into("<I", self._memory, RING_AT + self._count % RING_SIZE * 4, slot)
        self._count += 1
        COUNT.pack_into(self._memory, COUNT_AT, self._count)

    def free(self, slot: int) -> None:
        struct.pack_into("<I", self._memory, _at(slot), FREE)

    def touch(self, slots: Iterable[int]) -> None:
        for slot in slots:
            struct.pack_into("<Q", self._memory, _at(slot) + 24, time.time_ns())

    def generation(self, slot: int) -> int:
        number: int = struct.unpack_from("<Q", self._memory, _at(slot) + 8)[0]
        return number

    def close(self) -> None:
        self._memory.close()


class ShelfReader:
    """The index of another engine's shelf, in the folder `name` of `space`. Its content may change or end at any time.

    Raises `OSError` or `ValueError` where there is none of this `shape`.
    """

    def __init__(self, space: int, name: str, shape: bytes, kind: str = "") -> None:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=space)
        try:
            descriptor = open_file(folder, index_file(kind))
        finally:
            os.close(folder)
        if descriptor is None:
            raise ValueError("a shelf has no index")
        self.name = name
        self._file = descriptor
        self._slots: dict[bytes, int] = {}
        self._count = 0
        head = os.pread(descriptor, HEAD.size, 0)
        try:
            magic, found, self.identity, self._num_slots = HEAD.unpack(head)
        except struct.error:
            magic, found = b"", b""
        if (magic, found) != (MAGIC, shape):
            self.close()
            raise ValueError("a shelf holds blocks of another shape")
        if os.fstat(descriptor).st_size != SLOTS_AT + SLOT.size * self._num_slots:
            self.close()
            raise ValueError("the index of a shelf has not the size that it says")
        self._count = self._published()
        self._read(range(self._num_slots))

    @property
    def is_current(self) -> bool:
        """Whether the engine still uses this file: one that makes its index anew removes the earlier one."""
        return os.fstat(self._file).st_nlink > 0

    def catch_up(self) -> None:
        """Reads which slots were published since the last time."""
        count = self._published()
        if count - self._count > RING_SIZE // 2:
            self._read(range(self._num_slots))
        elif count != self._count:
            ring = np.frombuffer(os.pread(self._file, 4 * RING_SIZE, RING_AT), "<u4")
            for number in range(self._count, count):
                slot = int(ring[number % RING_SIZE]) if len(ring) == RING_SIZE else self._num_slots
                if slot < self._num_slots:
                    self._read(range(slot, slot + 1))
        self._count = count

    def find(self, key: bytes, since: int) -> tuple[int, int] | None:
        """(slot, generation) where the key is now, if that was written after `since`, in nanoseconds."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        found = read_slot(self._file, slot)
        if found is None or found[2] != key or found[1] < since:
            return None
        return slot, found[0]

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _published(self) -> int:
        data = os.pread(self._file, COUNT.size, COUNT_AT)
        return int(COUNT.unpack(data)[0]) if len(data) == COUNT.size else self._count

    def _read(self, slots: range) -> None:
        data = os.pread(self._file, SLOT.size * len(slots), SLOTS_AT + SLOT.size * slots.start)
        found = np.frombuffer(data[: len(data) // SLOT.size * SLOT.size], SLOTS)
        there = found[found["state"] == PUBLISHED]
        keys, numbers = there["key"].tobytes(), np.flatnonzero(found["state"] == PUBLISHED) + slots.start
        for start, size, slot in zip(
            range(0, len(keys), MOST_KEY), there["size"].tolist(), numbers.tolist(), strict=True
        ):
            self._slots[keys[start : start + min(size, MOST_KEY)]] = slot
        if len(self._slots) > 2 * self._num_slots:  # most of them are of blocks that are gone
            self._slots = {}
            self._read(range(self._num_slots))


def index_file(kind: str = "") -> str:
    """The name of the file; `kind` is as in `rows_file`."""
    return f"{kind}index"


def read_slot(file: int, slot: int) -> tuple[int, int, bytes] | None:
    """(generation, when it was written, key) of a published slot of an open index, else None."""
    data = os.pread(file, SLOT.size, _at(slot))
    if len(data) != SLOT.size:
        return None
    state, size, generation, made, _, key = SLOT.unpack(data)
    return (generation, made, key[:size]) if state == PUBLISHED else None


def _at(slot: int) -> int:
    return SLOTS_AT + SLOT.size * slot
