"""Host memory that outlives its process: one file in memory, which is mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from frame.interfaces import HeldMemory, HeldPiece


class HostHeldMemory(HeldMemory):
    """A file as large as the machine's memory, of which only what is written takes memory."""

    def __init__(self, pieces: Sequence[HeldPiece] = ()) -> None:
        self._limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        given = pieces[0] if pieces else HeldPiece(os.memfd_create("frame-weights", os.MFD_CLOEXEC), 0)
        self._descriptor = given.descriptor
        #: bytes that were there before
        self.found_bytes = given.num_bytes
        self._taken = 0
        if self._limit < given.num_bytes or len(pieces) > 1:
            raise ValueError(f"{len(pieces)} pieces of {given.num_bytes} bytes are no host memory of this machine")
        os.ftruncate(self._descriptor, self._limit)
        self._map = mmap.mmap(self._descriptor, self._limit)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        first = self._taken
        if first + num_bytes > self._limit:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes are more than this machine's memory")
        self._taken = -(-(first + num_bytes) // self.ALIGNMENT) * self.ALIGNMENT
        return self._bytes[first : first + num_bytes]

    def pieces(self) -> list[HeldPiece]:
        page = os.sysconf("SC_PAGE_SIZE")
        return [HeldPiece(self._descriptor, -(-self._taken // page) * page)]

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def empty(self) -> None:
        """Gives all of the memory back; it is zeros until it is written again, here and for whoever else has it."""
        self._map.madvise(mmap.MADV_REMOVE)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor is this memory."""
        return tensor.untyped_storage().data_ptr() == self._bytes.data_ptr()
