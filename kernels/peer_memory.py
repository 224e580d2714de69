"""Memory of one GPU that processes with other GPUs of this machine read and write, by the driver's handles.

Handles travel as bytes over the host; the memory ends with the process that allocated it. NVLink multicast is not used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

#: The driver's answer where a device has access to another one already.
_ALREADY_ENABLED = 704
#: Ranks beyond which kernels over peer memory are not worth their traffic.
MAX_RANKS = 8


class PeerMemoryError(RuntimeError):
    """The GPUs cannot reach each other's memory; says why."""


class Host(Protocol):
    """The same ranks over the host; a host group of `frame.interfaces` is one."""

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, in order of rank, on every rank."""

    def barrier(self) -> None:
        """Returns once every rank has called it."""


class PeerMemory:
    """`num_bytes` of each rank of `host`, mapped into this process; all ranks make it at the same time.

    `addresses` int64 [size] on the device are the ranks' memory as this device sees it, its own among it; all begins as
    zeros. Raises `PeerMemoryError` on every rank where one of them cannot write to another.
    """

    def __init__(self, device: torch.device, rank: int, size: int, host: Host, num_bytes: int) -> None:
        self._opened: list[int] = []
        self._allocated = 0
        self.device, self._num_bytes = device, num_bytes
        try:
            mine, handle, reason = *self._allocate(num_bytes), ""
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
        self._agree(host, self._probe(addresses, rank, host))
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def close(self) -> None:
        """Unmaps the peers' buffers and frees this rank's. May be called twice."""
        opened, self._opened = self._opened, []
        for address in opened:
            driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
        if self._allocated:
            driver().cuMemFree_v2(ctypes.c_uint64(self._allocated))
            self._allocated = 0

    def _agree(self, host: Host, reason: str) -> None:
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
        address, given = ctypes.c_uint64(), Handle.from_buffer_copy(handle)
        lazily_enabled = ctypes.c_uint(1)
        check("cuIpcOpenMemHandle", driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), given, lazily_enabled))
        self._opened.append(address.value)
        return address.value

    def _probe(self, addresses: list[int], rank: int, host: Host) -> str:
        """Has each rank copy a number to the others' memory, and looks at what came: the driver's word is not enough.

        A copy, since the first kernel of a process would first be compiled.
        """
        size, reason = len(addresses), ""
        sent = torch.tensor([1000 * (rank + 1) + peer for peer in range(size)], dtype=torch.int64, device=self.device)
        try:
            for peer, address in enumerate(addresses):
                target, source = ctypes.c_uint64(address + 8 * rank), ctypes.c_uint64(sent[peer:].data_ptr())
                check("cuMemcpyDtoD", driver().cuMemcpyDtoD_v2(target, source, ctypes.c_size_t(8)))
        except PeerMemoryError as error:  # the others wait for this rank below
            reason = f"rank {rank} cannot write to the memory of rank {peer}: {error}"
        torch.cuda.synchronize(self.device)
        host.barrier()
        found = self._memory().view(torch.int64)[:size].tolist()
        host.barrier()
        self._memory().zero_()
        torch.cuda.synchronize(self.device)
        host.barrier()
        wrong = [peer for peer in range(size) if found[peer] != 1000 * (peer + 1) + rank]
        return reason or (f"what rank {wrong[0]} wrote did not reach rank {rank}" if wrong else "")

    def _memory(self) -> Tensor:
        return torch.as_tensor(_Bytes(self._allocated, self._num_bytes), device=self.device)


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


class _Bytes:
    """Device memory as torch takes it from others."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def enable_access(device: int, peer: int) -> None:
    """Lets kernels on GPU `device` read and write what this process has allocated, and will, on GPU `peer`.

    Torch enables only what its own copies need. Raises `PeerMemoryError` where the GPUs cannot reach each other.
    """
    here, there = ctypes.c_int(), ctypes.c_int()
    check("cuInit", driver().cuInit(0))
    for number, found in ((device, here), (peer, there)):
        check("cuDeviceGet", driver().cuDeviceGet(ctypes.byref(found), number))
    reaches = ctypes.c_int()
    check("cuDeviceCanAccessPeer", driver().cuDeviceCanAccessPeer(ctypes.byref(reaches), here, there))
    if not reaches.value:
        raise PeerMemoryError(f"GPU {device} cannot read memory of GPU {peer}: nothing connects them that allows it")
    with _primary_context(here) as mine, _primary_context(there) as theirs:
        check("cuCtxPushCurrent", driver().cuCtxPushCurrent_v2(mine))
        try:
            status = driver().cuCtxEnablePeerAccess(theirs, 0)
        finally:
            driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        check("cuCtxEnablePeerAccess", 0 if status == _ALREADY_ENABLED else status)


@contextmanager
def _primary_context(device: ctypes.c_int) -> Iterator[ctypes.c_void_p]:
    """The context in which torch and Triton work on a device."""
    context = ctypes.c_void_p()
    check("cuDevicePrimaryCtxRetain", driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    try:
        yield context
    finally:
        driver().cuDevicePrimaryCtxRelease_v2(device)


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
