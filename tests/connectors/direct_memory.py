"""A stand-in for GPUs that map each other's memory: all engines are in this process, and copies are the processor's."""

from __future__ import annotations

import ctypes
from collections import Counter

import torch

from frame.interfaces import Mark
from frame.plugins.connectors.blocks.mapped_memory import Sharing

#: What was exported, by handle.
_EXPORTED: dict[bytes, tuple[int, int]] = {}


class FakeSharing(Sharing):
    """`faults` names what goes wrong: "export", "open", "copy" (raise), "probe" (another device's memory is read)."""

    device = torch.device("cpu")

    def __init__(self, device=None, *, faults=()):
        self.faults, self.copied, self.opened = set(faults), 0, Counter()

    def allocate(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free_bytes(self):
        return 1 << 40

    def export(self, region):
        if "export" in self.faults:
            raise RuntimeError("it has no handle")
        handle = len(_EXPORTED).to_bytes(80, "little")
        _EXPORTED[handle] = (region.untyped_storage().data_ptr(), region.untyped_storage().nbytes())
        return handle

    def open(self, handle):
        if "open" in self.faults:
            raise RuntimeError("the driver refuses it")
        address, size = _EXPORTED[handle]
        self.opened[handle] += 1
        return address + (256 if "probe" in self.faults else 0), size

    def release(self, handle):
        self.opened[handle] -= 1
        assert self.opened[handle] >= 0

    def copy(self, table, behind=None):
        if "copy" in self.faults:
            raise RuntimeError("the launch fails")
        if behind is not None:
            table = (behind[:, None] + table).reshape(-1, 4)
        for source, target, size, _ in table.tolist():
            if "probe" in self.faults:
                ctypes.memset(target, 0, size)
            else:
                ctypes.memmove(target, source, size)
        self.copied += len(table)
        return Mark()

    def launch(self, table):
        raise NotImplementedError("NIXL's blocks are copied on a stream of their own")

    def move(self, source, target, num_bytes):
        raise NotImplementedError("NIXL's blocks are copied by a kernel")
