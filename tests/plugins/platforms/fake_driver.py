"""The driver's calls about memory that can be exported, on files in host memory, which are mapped where it says."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED = 0x10


class FakeDriver:
    """A device of `total` bytes: `used` are those that a handle, a mapping or a file keeps alive in this process."""

    def __init__(self, total: int = 1 << 30, *, exports: bool = True) -> None:
        self.total, self.exports = total, exports
        self.handles: dict[int, tuple[int, int]] = {}  # handle -> (file, bytes)
        self.created = self.mapped = 0
        self.names: list[str] = []
        self.accessible: dict[int, int] = {}

    def __getattribute__(self, name):
        if name.startswith("cu"):
            super().__getattribute__("names").append(name)
        return super().__getattribute__(name)

    def cuDeviceGetAttribute(self, found, attribute, device):
        found._obj.value = int(self.exports and attribute.value == 103)
        return 0

    def cuMemAddressReserve(self, first, size, alignment, wanted, flags):
        first._obj.value = _LIBC.mmap(None, size.value, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        return 0

    def cuMemCreate(self, handle, size, prop, flags):
        assert (prop._obj.type, prop._obj.handle_types, prop._obj.location.type) == (1, 1, 1)
        assert size.value % (2 << 20) == 0
        if self.created + size.value > self.total:
            return 2
        self.created += size.value
        file = os.memfd_create("device")
        os.ftruncate(file, size.value)
        handle._obj.value = 1000 + len(self.names)
        self.handles[handle._obj.value] = file, size.value
        return 0

    def cuMemMap(self, address, size, offset, handle, flags):
        file, num_bytes = self.handles[handle.value]
        assert (size.value, offset.value) == (num_bytes, 0)
        found = _LIBC.mmap(address.value, num_bytes, 3, mmap.MAP_SHARED | _FIXED, file, 0)
        assert found == address.value
        self.mapped += num_bytes
        return 0

    def cuMemSetAccess(self, address, size, access, count):
        assert (access._obj.flags, access._obj.location.type, count.value) == (3, 1, 1)
        self.accessible[address.value] = size.value
        return 0

    def cuMemExportToShareableHandle(self, found, handle, kind, flags):
        found._obj.value = os.dup(self.handles[handle.value][0])
        return 0

    def cuMemImportFromShareableHandle(self, handle, file, kind):
        handle._obj.value = 1000 + len(self.names)
        copy = os.dup(file.value)
        self.handles[handle._obj.value] = copy, os.fstat(copy).st_size
        return 0

    def cuMemRelease(self, handle):
        os.close(self.handles.pop(handle.value)[0])
        return 0

    def cuCtxSynchronize(self):
        return 0

    def cuMemUnmap(self, address, size):
        _LIBC.munmap(address.value, size.value)
        self.mapped -= size.value
        return 0

    def cuMemAddressFree(self, first, size):
        return 0

    def cuGetErrorString(self, status, said):
        return 0


def view_of(address: int, num_bytes: int) -> torch.Tensor:
    """The bytes at an address of this process."""
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)
