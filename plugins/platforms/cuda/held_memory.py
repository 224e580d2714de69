"""Device memory that outlives its process: the driver's allocations, exported as open files and mapped in one run.

A process that has such a file open keeps the memory without a context on the device.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import HeldMemory, HeldPiece
from frame.kernels.peer_memory import PeerMemoryError, check, driver

#: Bytes of an allocation at first, and at most: each doubles what there is.
LEAST_BYTES, MOST_BYTES = 32 << 20, 256 << 20
_OUT_OF_MEMORY = 2
_BY_FILE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_EXPORTS_FILES = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED


class Location(ctypes.Structure):
    """CUmemLocation: of type 1, a device, by its number."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp; type 1 is memory that stays in place."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("direct", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc; flags 3 are reading and writing."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class CudaHeldMemory(HeldMemory):
    """Memory of `device`, or that of `pieces`; at most `limit` bytes. Raises `PeerMemoryError` where it cannot be had.

    It is mapped as long as this object or a tensor of it lives.
    """

    def __init__(self, device: torch.device, limit: int, pieces: Sequence[HeldPiece] = (), calls: Any = None) -> None:
        self._device, self._calls = device, driver() if calls is None else calls
        self._location = Location(1, device.index or 0)
        self._prop = AllocationProp(type=1, handle_types=_BY_FILE, location=self._location)
        self._files = [piece.descriptor for piece in pieces]
        self._handles: list[int] = []  # of allocations that are not exported yet
        self._sizes = list[int]()
        self._taken = self._mapped = 0
        try:
            self._require()
            self._limit = -(-limit // MOST_BYTES) * MOST_BYTES
            self._first = self._reserve(self._limit)
            self._unmap = weakref.finalize(self, _unmap, self._calls, self._first, self._limit, self._sizes)
            self._unmap.atexit = False
            for piece in pieces:
                self._map(self._imported(piece), piece.num_bytes)
            if not pieces:
                self._grow()
                self._export()  # here it may fail without harm
            #: bytes that were there before, or are mapped from the start
            self.found_bytes = self._mapped
        except BaseException:
            self.release()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes that are mapped."""
        return self._mapped

    def take(self, num_bytes: int) -> Tensor:
        first = self._taken
        while first + num_bytes > self._mapped:
            self._grow()
        self._taken = -(-(first + num_bytes) // self.ALIGNMENT) * self.ALIGNMENT
        return self._view(self._first + first, num_bytes)

    def pieces(self) -> list[HeldPiece]:
        self._export()
        return [HeldPiece(*piece) for piece in zip(self._files, self._sizes, strict=True)]

    def release(self) -> None:
        files, self._files = self._files, []
        handles, self._handles = self._handles, []
        for file in files:
            os.close(file)
        for handle in handles:
            self._calls.cuMemRelease(ctypes.c_uint64(handle))

    def _view(self, address: int, num_bytes: int) -> Tensor:
        return torch.as_tensor(_Part(self, address, num_bytes), device=self._device)

    def _require(self) -> None:
        found = ctypes.c_int()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # makes the device's context this thread's
        self._check("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(_EXPORTS_FILES), self._location.id)
        if not found.value:
            raise PeerMemoryError(f"memory of {self._device} cannot be exported as files")

    def _reserve(self, num_bytes: int) -> int:
        first, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        size, alignment = ctypes.c_size_t(num_bytes), ctypes.c_size_t(0)
        self._check("cuMemAddressReserve", ctypes.byref(first), size, alignment, zero, zero)
        return first.value

    def _grow(self) -> None:
        size = min(MOST_BYTES, max(LEAST_BYTES, self._mapped))
        if self._mapped + size > self._limit:
            raise torch.OutOfMemoryError(f"{self._device} has no more than {self._limit} bytes")
        handle, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        status = self._calls.cuMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._prop), zero
        )  # fmt: skip
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{self._device} has no {size >> 20} MiB left for weights")
        check("cuMemCreate", status)
        self._handles.append(handle.value)
        self._map(handle.value, size)

    def _imported(self, piece: HeldPiece) -> int:
        handle = ctypes.c_uint64()
        file, kind = ctypes.c_void_p(piece.descriptor), ctypes.c_int(_BY_FILE)
        self._check("cuMemImportFromShareableHandle", ctypes.byref(handle), file, kind)
        return handle.value

    def _map(self, handle: int, size: int) -> None:
        address, given = ctypes.c_uint64(self._first + self._mapped), ctypes.c_uint64(handle)
        num_bytes, zero = ctypes.c_size_t(size), ctypes.c_uint64(0)
        status = self._calls.cuMemMap(address, num_bytes, ctypes.c_size_t(0), given, zero)
        if handle not in self._handles:  # imported: the mapping keeps it
            self._check("cuMemRelease", given)
        check("cuMemMap", status)
        self._sizes.append(size)
        self._mapped += size
        access = AccessDesc(self._location, 3)
        self._check("cuMemSetAccess", address, num_bytes, ctypes.byref(access), ctypes.c_size_t(1))

    def _export(self) -> None:
        while self._handles:
            file, handle = ctypes.c_int(-1), ctypes.c_uint64(self._handles[0])
            kind, zero = ctypes.c_int(_BY_FILE), ctypes.c_uint64(0)
            self._check("cuMemExportToShareableHandle", ctypes.byref(file), handle, kind, zero)
            self._files.append(file.value)
            self._handles.pop(0)
            self._check("cuMemRelease", handle)  # mapping and file keep it

    def _check(self, call: str, *arguments: Any) -> None:
        check(call, getattr(self._calls, call)(*arguments))


class _Part:
    """Memory as torch takes it from others, which keeps what maps it alive."""

    def __init__(self, owner: CudaHeldMemory, address: int, num_bytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _unmap(calls: Any, first: int, reserved: int, sizes: list[int]) -> None:
    calls.cuCtxSynchronize()
    address = first
    for size in sizes:
        calls.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size))
        address += size
    calls.cuMemAddressFree(ctypes.c_uint64(first), ctypes.c_size_t(reserved))
