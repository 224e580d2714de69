"""The memory by which kernels and copies sum over GPUs of this machine."""

from __future__ import annotations

import torch

from frame.interfaces import HostGroup
from frame.kernels import peer_memory
from frame.kernels.all_reduce import PeerBuffers
from frame.kernels.peer_copies import CopyBuffers
from frame.kernels.peer_memory import MAX_RANKS as MAX_RANKS, PeerMemoryError as PeerMemoryError

#: Bytes of a tensor that travels with numbers, and of one that travels alone; the second is divided by the ranks.
PACKED_BYTES, PLAIN_BYTES = 512 << 10, 32 << 20
#: Bytes before the memory for copies, of which its two signals take 16.
_SIGNAL_BYTES = 256


def plain_bytes(size: int) -> int:
    """Bytes of the tensor that travels alone among `size` ranks: whole stores of 16 bytes, whatever `size` is."""
    return PLAIN_BYTES // size // 16 * 16


class PeerMemory(peer_memory.PeerMemory):
    """The buffers of all ranks of `host`, mapped into this process; all ranks make it at the same time.

    Behind them lie two words and `copied_bytes` more, into which the other one of two ranks copies.
    Raises `PeerMemoryError` on every rank where one of them cannot write to another.
    """

    def __init__(self, device: torch.device, rank: int, size: int, host: HostGroup, *, copied_bytes: int = 0) -> None:
        state = torch.zeros(2, dtype=torch.int64, device=device)
        planned = PeerBuffers(rank, size, state, state, PACKED_BYTES, plain_bytes(size))
        more = copied_bytes + _SIGNAL_BYTES if copied_bytes else 0
        super().__init__(device, rank, size, host, planned.num_bytes + more)
        self.buffers = PeerBuffers(rank, size, self.addresses, state, PACKED_BYTES, plain_bytes(size))

    def copy_buffers(self) -> tuple[CopyBuffers, int]:
        """What two ranks share for sums by copies, and the address of the other rank's memory for this one's values."""
        here, at = self._memory()[self.buffers.num_bytes :], int(self.addresses[1 - self.buffers.rank])
        at += self.buffers.num_bytes
        theirs = torch.tensor([at], dtype=torch.int64, device=self.device)
        state = torch.zeros(2, dtype=torch.int64, device=self.device)
        signals = here[:16].view(torch.int64)
        return CopyBuffers(here[_SIGNAL_BYTES:], signals, theirs, state), at + _SIGNAL_BYTES
