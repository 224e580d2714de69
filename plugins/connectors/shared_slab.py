"""Host memory in rows, in a file of a shelf: one worker's part of the blocks, with what each row is known by.

A row is known by its generation and a seal over its content, its key and its place, which are written behind it. What
an engine before this one left is taken over where it has the same form. Knows no layer.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from .host_slab import HostSlab, check_room, gib
from .row_sums import RowSums, seal
from .shelf import Shelf, open_file
from .shelf_index import FILE as INDEX, read_slot

logger = logging.getLogger("frame.connectors.offload")

MAGIC = b"frameRW1"
HEAD = struct.Struct("<8s16sQQ16s")  # magic, how bytes lie in a row, its bytes, rows, identity
MARK = struct.Struct("<QQ")  # generation, seal
MARKS_AT = 4096


class SharedSlab(HostSlab):
    """As many rows of `row_bytes` as `num_bytes` hold, for the worker at `place`, on `device`."""

    def __init__(
        self, shelf: Shelf, place: int, formats: str, row_bytes: int, num_bytes: int, device: torch.device
    ) -> None:
        self.row_bytes = row_bytes
        self.num_rows = num_bytes // row_bytes
        self.shelf = shelf
        self._file = rows_file(place)
        self._form = (MAGIC, formats.encode(), row_bytes, self.num_rows)
        self._start = rows_start(self.num_rows)
        size = self._start + self.num_rows * row_bytes
        descriptor = self._left(size) or self._new(size)
        self.identity: bytes = HEAD.unpack(os.pread(descriptor, HEAD.size, 0))[-1]
        self._memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        whole = np.frombuffer(self._memory, np.uint8)
        self._rows = torch.from_numpy(whole)[self._start :].view(self.num_rows, row_bytes)
        self._sums = RowSums(row_bytes, torch.device("cpu"))
        self._pinned = torch.from_numpy(whole) if device.type == "cuda" and pin(whole) else None

    def row(self, row: int) -> np.ndarray:
        return self._rows[row].numpy()

    def runs(self, rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        place = 0
        while place < len(rows):
            count = 1
            while place + count < len(rows) and rows[place + count] == rows[place] + count:
                count += 1
            yield place, self._rows[rows[place] : rows[place] + count]
            place += count

    def sign(self, row: int, key: bytes, generation: int, part: int, row_sum: int | None = None) -> None:
        """Says whose the row is, which is written; without `row_sum` that is computed."""
        if row_sum is None:
            row_sum = int(self._sums(self._rows[row : row + 1]))
        MARK.pack_into(self._memory, MARKS_AT + MARK.size * row, generation, seal(row_sum, key, generation, part))

    def sound(self, row: int, key: bytes, generation: int, part: int) -> bool:
        """Whether the row holds what `sign` was called for."""
        mark = MARK.unpack_from(self._memory, MARKS_AT + MARK.size * row)
        row_sum = int(self._sums(self._rows[row : row + 1]))
        return bool(mark == (generation, seal(row_sum, key, generation, part)))

    def take(self, name: str, slot: int, generation: int, key: bytes, row: int, parts: int) -> bool:
        """Copies the block in `slot` of another engine's shelf to `row` and those behind; False where it is not sound.

        Other processes may write to that slot, or shorten or remove its file, at any time.
        """
        try:
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.shelf.space)
        except OSError:
            return False
        opened = [folder]
        try:
            rows, index = open_file(folder, self._file), open_file(folder, INDEX)
            opened += [one for one in (rows, index) if one is not None]
            if rows is None or index is None:
                return False
            head = os.pread(rows, HEAD.size, 0)
            if len(head) != HEAD.size or HEAD.unpack(head)[:3] != self._form[:3]:
                return False
            start = rows_start(HEAD.unpack(head)[3])
            for part in range(parts):
                there = slot * parts + part
                out = self.row(row + part)
                if os.preadv(rows, [out.data], start + there * self.row_bytes) != self.row_bytes:
                    return False
                mark = os.pread(rows, MARK.size, MARKS_AT + MARK.size * there)
                row_sum = int(self._sums(self._rows[row + part : row + part + 1]))
                if mark != MARK.pack(generation, seal(row_sum, key, generation, part)):
                    return False
            found = read_slot(index, slot)
            return found is not None and (found[0], found[2]) == (generation, key)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def close(self) -> None:
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        self._rows = torch.empty(0)
        with suppress(BufferError):  # somebody has a row, and the memory goes with that
            self._memory.close()

    def _left(self, size: int) -> int | None:
        """What an engine before this one left, or another worker did not."""
        descriptor = self.shelf.open(self._file)
        if descriptor is None:
            return None
        head = os.pread(descriptor, HEAD.size, 0)
        if os.fstat(descriptor).st_size == size and len(head) == HEAD.size and HEAD.unpack(head)[:4] == self._form:
            return descriptor
        os.close(descriptor)
        return None

    def _new(self, size: int) -> int:
        self.shelf.remove(self._file)
        self.shelf.make_room(size)
        check_room(size)
        try:
            descriptor = self.shelf.create(self._file, size)
        except OSError as error:
            raise ValueError(
                f"this worker is to keep {gib(size)} of blocks in shared memory, where {gib(self.shelf.free_bytes())} "
                f"are free ({error.strerror}): lower kv_offloading_size, or name another shared_folder"
            ) from None
        os.pwrite(descriptor, HEAD.pack(*self._form, secrets.token_bytes(16)), 0)
        return descriptor


def rows_file(place: int) -> str:
    """The name of the file with the rows of one worker."""
    return f"rows-{place}"


def rows_start(num_rows: int) -> int:
    """Where the first of so many rows lies in the file."""
    return -(-(MARKS_AT + MARK.size * num_rows) // 4096) * 4096


def pin(memory: np.ndarray) -> bool:
    """Lets the device copy this memory beside other work; False where it cannot, which is slower."""
    error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(error):
        logger.warning("shared memory could not be pinned (CUDA error %d): copies are slower", int(error))
    return not int(error)
