"""A stand-in for GPUs that map each other's memory: the device's memory is files, which other processes map too.

An engine's own address of a piece of memory is never the one at which another engine finds it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import uuid

import torch

from frame.interfaces import Mark
from frame.plugins.connectors.blocks.mapped_memory import Sharing


class FileSharing(Sharing):
    """`faults` names what goes wrong.

    "allocate", "export", "open", "move", "copy", "launch" raise; with "read" other memory is read than was opened, with
    "write" nothing that is written to opened memory arrives. Copies to opened memory wait while `pause` is set.
    """

    device = torch.device("cpu")

    def __init__(self, folder, faults=(), free=1 << 40):
        self.folder, self.faults, self.free = folder, set(faults), free
        self.made, self.mapped = {}, {}  # paths by address; handles, by the address here, of [count, map, size]
        self.pause, self.passed, self.writes = threading.Event(), threading.Event(), []
        self.writing = threading.Event()
        self._lock = threading.Lock()

    def allocate(self, num_bytes):
        if "allocate" in self.faults:
            raise RuntimeError("the device has not got that much")
        path = self.folder / uuid.uuid4().hex
        with open(path, "w+b") as file:
            file.truncate(num_bytes)
            memory = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
        self.made[memory.untyped_storage().data_ptr()] = path
        return memory

    def free_bytes(self):
        return self.free

    def export(self, region):
        if "export" in self.faults:
            raise RuntimeError("it has no handle")
        return str(self.made[region.untyped_storage().data_ptr()]).encode()

    def open(self, handle):
        if "open" in self.faults:
            raise RuntimeError("the driver refuses it")
        with self._lock:
            if handle not in self.mapped:
                file = os.open(handle.decode(), os.O_RDWR)
                found = mmap.mmap(file, 0)
                os.close(file)
                self.mapped[handle] = [0, found, ctypes.addressof(ctypes.c_char.from_buffer(found))]
            one = self.mapped[handle]
            one[0] += 1
            return one[2], len(one[1])

    def release(self, handle):
        with self._lock:
            self.mapped[handle][0] -= 1
            assert self.mapped[handle][0] >= 0
            if not self.mapped[handle][0]:
                del self.mapped[handle]

    def copy(self, table, behind=None):
        assert behind is None
        if "copy" in self.faults:
            raise RuntimeError("the launch fails")
        return _Moved(self, [row[:3] for row in table.tolist()])

    def launch(self, table):
        if "launch" in self.faults:
            raise RuntimeError("the launch fails")
        _Moved(self, [row[:3] for row in table.tolist()]).wait()
        return lambda: 1e-3

    def move(self, source, target, num_bytes):
        if "move" in self.faults:
            raise RuntimeError("the launch fails")
        return _Moved(self, [(source, target, num_bytes)])

    def finds(self, address):
        """Whether memory of another worker lies there."""
        with self._lock:
            return any(start <= address < start + len(found) for _, found, start in self.mapped.values())


class _Moved(Mark):
    """Copies when it is waited for, as only then a device is known to have done so."""

    def __init__(self, sharing, pieces):
        self._sharing, self._pieces = sharing, pieces

    def done(self):
        raise NotImplementedError("it is waited for")

    def wait(self):
        for piece in self._pieces:
            self._copy(self._sharing, *piece)

    def _copy(self, sharing, source, target, size):
        if sharing.finds(target):
            sharing.writing.set()
            if sharing.pause.is_set():
                assert sharing.passed.wait(60)
            sharing.writes.append((target, size))
            if "write" in sharing.faults:
                return
        if "read" in sharing.faults and sharing.finds(source):
            ctypes.memset(target, 0, size)
        else:
            ctypes.memmove(target, source, size)
