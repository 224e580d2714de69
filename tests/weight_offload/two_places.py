"""A CPU that stands for a device beside the host: weights are copied late, over memory that is spoiled until then."""

from __future__ import annotations

import time

import pytest
from torch import Tensor

from frame.ops import Ops
from frame.plugins.platforms.cpu import CpuPlatform, HostMemory, HostStreams, SideThread
from frame.weight_offload.host_bytes import HostBytes

_copy = HostBytes.copy_to


def _copy_late(self: HostBytes, target: Tensor, start: int, stop: int) -> None:
    target[start:stop].fill_(0xFF)  # floats that are not numbers
    time.sleep(1e-3)
    _copy(self, target, start, stop)


def make_two_places(patch: pytest.MonkeyPatch) -> None:
    """Has CPU platforms say that they keep weights apart, and copy them in threads of their own."""
    patch.setattr(HostMemory, "offloads", True)
    patch.setattr(HostStreams, "side_queue", lambda self: SideThread())
    patch.setattr(HostBytes, "copy_to", _copy_late)
    patch.setattr(CpuPlatform, "ops", lambda self: Ops())  # which packs no weights
