"""Host memory in rows, in a file of a shelf: one worker's part of the blocks, with what each row is known by.

A row is known by its generation and a seal over its content, its key and its place, which are written behind it. What
an engine before this one left is taken over where it has the same form. Knows no layer.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from ..blocks.host_slab import HostSlab, check_room, gib
from .foreign_rows import ForeignRows, write_form
from .row_forms import RowForm
from .row_sums import RowSums, seal
from .rows_file import HEAD, MAGIC, MARK, MARKS_AT, rows_file, rows_start
from .shelf import Shelf

logger = logging.getLogger("frame.connectors.offload")


class SharedSlab(HostSlab):
    """As many rows of this `form` as `num_bytes` hold, for the worker at `place`, on `device`; `formats` names it.

    `kind` is as in `rows_file`.
    """

    def __init__(
        self,
        shelf: Shelf,
        place: int,
        form: RowForm,
        formats: str,
        num_bytes: int,
        device: torch.device,
        kind: str = "",
    ) -> None:
        row_bytes = form.row_bytes
        self.row_bytes = row_bytes
        self.num_rows = num_bytes // row_bytes
        self.shelf = shelf
        self._file = rows_file(place, kind)
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
        self._digest = form.digest
        self._foreign = ForeignRows(shelf.space, form, kind)
        write_form(shelf, place, form, kind)
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
        MARK.pack_into(
            self._memory, MARKS_AT + MARK.size * row, generation, seal(row_sum, key + self._digest, generation, part)
        )

    def sound(self, row: int, key: bytes, generation: int, part: int) -> bool:
        """Whether the row holds what `sign` was called for."""
        mark = MARK.unpack_from(self._memory, MARKS_AT + MARK.size * row)
        row_sum = int(self._sums(self._rows[row : row + 1]))
        return bool(mark == (generation, seal(row_sum, key + self._digest, generation, part)))

    def take(self, name: str, slot: int, generation: int, key: bytes, row: int, parts: int) -> bool:
        """Copies a block of another shelf to `row` and those behind; False where it is not sound."""
        return self._foreign.take(name, slot, generation, key, self._rows[row : row + parts])

    def close(self) -> None:
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        self._rows = torch.empty(0)
        with suppress(BufferError):  # somebody has a row, and the memory goes with that
            self._memory.close()

    def _left(self, size: int) -> int | None:
        """What an engine before this one left, or another worker did not."""
        descriptor = self.shelf.open(self._file, size)
        if descriptor is None:
            return None
        head = os.pread(descriptor, HEAD.size, 0)
        if len(head) == HEAD.size and HEAD.unpack(head)[:4] == self._form:
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


def pin(memory: np.ndarray) -> bool:
    """Lets the device copy this memory beside other work; False where it cannot, which is slower."""
    error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(error):
        logger.warning("shared memory could not be pinned (CUDA error %d): copies are slower", int(error))
    return not int(error)
