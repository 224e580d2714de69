"""A GPU's memory that other processes of this machine may reach: handles of regions, and regions that were opened.

A handle is worth something only on the machine and only while the process lives that made it. Memory of virtual
addresses (torch's expandable segments) has none.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .peer_memory import Handle, PeerMemoryError, check, driver

#: The driver's 64 bytes, then where the region begins in the memory that they stand for, and its bytes.
_FORM = struct.Struct("<64sQQ")
HANDLE_BYTES = _FORM.size


def export(region: Tensor) -> bytes:
    """A handle, `HANDLE_BYTES` long, of a CUDA tensor's memory; raises `PeerMemoryError` where there can be none."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), (ctypes.c_byte * 64)()
    address = region.untyped_storage().data_ptr()
    with _entered(region.device):
        found = driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        check("cuMemGetAddressRange", found)
        check("cuIpcGetMemHandle", driver().cuIpcGetMemHandle(ctypes.byref(handle), base))
    return _FORM.pack(bytes(handle), address - base.value, region.untyped_storage().nbytes())


class SharedMemory:
    """Regions of other processes that this one has opened on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._opened: dict[bytes, tuple[int, int]] = {}  # (address here, how often) by the driver's handle

    def open(self, handle: bytes) -> tuple[int, int]:
        """The address here, and the bytes, of the region that `export` gave a handle of.

        Raises `PeerMemoryError` where it cannot be opened.
        """
        if len(handle) != HANDLE_BYTES:
            raise PeerMemoryError(f"a handle has {HANDLE_BYTES} bytes, got {len(handle)}")
        given, start, size = _FORM.unpack(handle)
        address, count = self._opened.get(given, (0, 0))
        if not count:  # several regions may share it, and the driver opens it once
            found, asked, lazily_enabled = ctypes.c_uint64(), Handle.from_buffer_copy(given), ctypes.c_uint(1)
            with _entered(self._device):
                done = driver().cuIpcOpenMemHandle_v2(ctypes.byref(found), asked, lazily_enabled)
                check("cuIpcOpenMemHandle", done)
            address = found.value
        self._opened[given] = address, count + 1
        return address + start, size

    def release(self, handle: bytes) -> None:
        """Gives back what `open` gave, once for each time; nothing may read or write it any more."""
        given = _FORM.unpack(handle)[0]
        address, count = self._opened.pop(given)
        if count > 1:
            self._opened[given] = address, count - 1
            return
        with _entered(self._device):
            check("cuIpcCloseMemHandle", driver().cuIpcCloseMemHandle(ctypes.c_uint64(address)))


def copy(source: int, target: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Has a copy engine copy one piece, also from or to an opened region, and from pinned memory of the host.

    Raises `PeerMemoryError`.
    """
    given = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes))
    with _entered(stream.device):
        check("cuMemcpyAsync", driver().cuMemcpyAsync(*given, ctypes.c_void_p(stream.cuda_stream)))


@contextmanager
def _entered(device: torch.device) -> Iterator[None]:
    """Within it the device's context is this thread's; waits for nothing."""
    with torch.cuda.device(device):
        torch.cuda.default_stream(device).query()
        yield
