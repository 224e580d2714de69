"""Memory of one GPU that processes with other GPUs of this machine read and write, by the driver's handles.

Handles travel as bytes over the host; the memory ends with the process that allocated it. NVLink multicast is not used.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import HostGroup
from frame.kernels.all_reduce import PeerBuffers, write_pattern
from frame.kernels.peer_copies import CopyBuffers

logger = logging.getLogger("frame.platforms.cuda")

#: Bytes of a tensor that travels with numbers, and of one that travels alone; the second is divided by the ranks.
PACKED_BYTES, PLAIN_BYTES = 256 << 10, 32 << 20
#: Ranks beyond which the kernels are not worth their traffic.
MAX_RANKS = 8
#: Bytes before the memory for copies, of which its two signals take 16.
_SIGNAL_BYTES = 256


def plain_bytes(size: int) -> int:
    """Bytes of the tensor that travels alone among `size` ranks: whole stores of 16 bytes, whatever `size` is."""
    return PLAIN_BYTES // size // 16 * 16


class PeerMemoryError(RuntimeError):
    """The GPUs cannot reach each other's memory; says why."""


class PeerMemory:
    """The buffers of all ranks of `host`, mapped into this process; all ranks make it at the same time.

    Behind them lie two words and `copied_bytes` more, into which the other one of two ranks copies.
    Raises `PeerMemoryError` on every rank where one of them cannot write to another.
    """

    def __init__(self, device: torch.device, rank: int, size: int, host: HostGroup, *, copied_bytes: int = 0) -> None:
        self._opened: list[int] = []
        self._allocated = 0
        self.device = device
        self._copied_bytes = copied_bytes + _SIGNAL_BYTES if copied_bytes else 0
        state = torch.zeros(2, dtype=torch.int64, device=device)
        placeholder = PeerBuffers(rank, size, state, state, PACKED_BYTES, plain_bytes(size))
        try:
            mine, handle, reason = *self._allocate(placeholder.num_bytes + self._copied_bytes), ""
        except PeerMemoryError as error:
            mine, handle, reason = 0, b"", str(error)
        addresses = [mine] * size
        for peer, theirs in enumerate(host.gather(handle)):
            if peer != rank and not reason:
                try:
                    addresses[peer] = self._open(theirs)
                except PeerMemoryError as error:
                    reason = f"rank {rank} cannot open the memory of rank {peer}: {error}"
        self._agree(host, reason)
        self._addresses = addresses
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.buffers = PeerBuffers(rank, size, table, state, PACKED_BYTES, plain_bytes(size))
        self._agree(host, self._probe(host))

    def copy_buffers(self) -> tuple[CopyBuffers, int]:
        """What two ranks share for sums by copies, and the address of the other rank's memory for this one's values."""
        here, at = self._memory()[self.buffers.num_bytes :], self._addresses[1 - self.buffers.rank]
        at += self.buffers.num_bytes
        theirs = torch.tensor([at], dtype=torch.int64, device=self.device)
        state = torch.zeros(2, dtype=torch.int64, device=self.device)
        signals = here[:16].view(torch.int64)
        return CopyBuffers(here[_SIGNAL_BYTES:], signals, theirs, state), at + _SIGNAL_BYTES

    def close(self) -> None:
        """Unmaps the peers' buffers and frees this rank's. May be called twice."""
        opened, self._opened = self._opened, []
        for address in opened:
            driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
        if self._allocated:
            driver().cuMemFree_v2(ctypes.c_uint64(self._allocated))
            self._allocated = 0

    def _agree(self, host: HostGroup, reason: str) -> None:
        reasons = [found.decode() for found in host.gather(reason.encode()) if found]
        if reasons:
            self.close()
            raise PeerMemoryError(reasons[0])

    def _allocate(self, num_bytes: int) -> tuple[int, bytes]:
        torch.cuda.synchronize(self.device)  # makes the device's context this thread's
        address, handle = ctypes.c_uint64(), (ctypes.c_byte * 64)()
        check("cuMemAlloc", driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)))
        self._allocated = address.value
        check("cuMemsetD8", driver().cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)))
        check("cuIpcGetMemHandle", driver().cuIpcGetMemHandle(ctypes.byref(handle), address))
        torch.cuda.synchronize(self.device)
        return address.value, bytes(handle)

    def _open(self, handle: bytes) -> int:
        if len(handle) != 64:
            raise PeerMemoryError("it has no handle")
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        lazily_enabled = ctypes.c_uint(1)
        check("cuIpcOpenMemHandle", driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), given, lazily_enabled))
        self._opened.append(address.value)
        return address.value

    def _probe(self, host: HostGroup) -> str:
        """Has each rank write into the others' memory, and looks at what came: the driver's word is not enough."""
        buffers = self.buffers
        write_pattern(buffers)
        torch.cuda.synchronize(self.device)
        host.barrier()
        found = self._memory().view(torch.int64)[: buffers.size].tolist()
        host.barrier()
        self._memory().zero_()
        torch.cuda.synchronize(self.device)
        host.barrier()
        expected = [1000 * (peer + 1) + buffers.rank for peer in range(buffers.size)]
        wrong = [peer for peer in range(buffers.size) if found[peer] != expected[peer]]
        return f"what rank {wrong[0]} wrote did not reach rank {buffers.rank}" if wrong else ""

    def _memory(self) -> Tensor:
        return torch.as_tensor(_Bytes(self._allocated, self.buffers.num_bytes + self._copied_bytes), device=self.device)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


class _Bytes:
    """Device memory as torch takes it from others."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


@cache
def driver() -> Any:
    """The driver's library; raises `PeerMemoryError` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerMemoryError(f"the driver's library cannot be loaded: {error}") from None


def check(call: str, status: int) -> None:
    """Raises `PeerMemoryError` with what the driver says of `status`, unless that is 0."""
    if status:
        said = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(said))
        raise PeerMemoryError(f"{call}: {(said.value or b'').decode() or f'error {status}'}")
