"""Groups of CUDA devices that are not there: what sums over the tensor group launches, without the other workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from frame.interfaces import ProcessGroup, SingleHost, UnconnectedCollectives
from frame.kernels.all_reduce import PeerBuffers
from frame.kernels.peer_copies import CopyBuffers
from frame.ops import Ops

from ..collectives import OVERLAP_BYTES, PeerGroup
from ..peer_copies import COPIED_BYTES, PeerCopies
from ..peer_memory import MAX_RANKS, PACKED_BYTES, plain_bytes


class AbsentCollectives(UnconnectedCollectives):
    """As `CudaCollectives` of devices that reach each other's memory; all its collectives are rehearsed.

    Where they turn out not to reach it, the kernels for it were compiled for nothing.
    """

    is_silent = True

    def __init__(
        self, rank: int, device: torch.device, ops: Ops, *, shares_memory: bool = True, copies_sums: bool = True
    ) -> None:
        super().__init__(rank)
        self._device, self._ops = device, ops
        self._shares_memory, self._copies_sums = shares_memory, copies_sums

    def group(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        if name != "tensor" or not self._shares_memory or len(ranks) > MAX_RANKS:
            return super().group(name, ranks)
        rank, size = ranks.index(self._rank), len(ranks)
        words = torch.zeros(size, dtype=torch.int64, device=self._device)
        buffers = PeerBuffers(rank, size, words, words, PACKED_BYTES, plain_bytes(size))
        copies = PeerCopies(_AbsentMemory(self._device)) if self._copies_sums and size == 2 else None
        group = PeerGroup(name, rank, size, None, SingleHost(), self, buffers, self._ops, copies)
        group.overlap_bytes = OVERLAP_BYTES
        return group


class _AbsentMemory:
    """Stands for the memory into which the other one of two ranks copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copy_buffers(self) -> tuple[CopyBuffers, int]:
        words = torch.zeros(2, dtype=torch.int64, device=self.device)
        received = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=self.device)
        return CopyBuffers(received, words, words, words), 0
