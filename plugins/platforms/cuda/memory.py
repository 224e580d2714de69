"""A CUDA device's memory: how much the KV cache may take of it. Knows no model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from frame.interfaces import Memory, MemorySnapshot

if TYPE_CHECKING:
    from .held_memory import CudaHeldMemory

logger = logging.getLogger("frame.platforms.cuda")

#: Kept free beside weights, cache, activations and captured steps: library workspaces, and what fragments take.
RESERVE_BYTES = 400 << 20


class CudaMemory(Memory):
    """The device's memory as the driver and torch's allocator report it.

    `captured_share` says how large captured steps with prompts are, as a share of the step that is profiled.
    """

    needs_profile = True
    offloads = True

    def __init__(self, device: torch.device, captured_share: Callable[[], float] = lambda: 0.0) -> None:
        self._device = device
        self._captured_share = captured_share
        #: memory of weights that outlives the process; it is no memory of torch's
        self.held: CudaHeldMemory | None = None

    @property
    def _held_bytes(self) -> int:
        return 0 if self.held is None else self.held.num_bytes

    @property
    def _found_bytes(self) -> int:
        """Those that were held before the device was looked at: what earlier processes left, or what it began with."""
        return 0 if self.held is None else self.held.found_bytes

    def snapshot(self) -> MemorySnapshot:
        free, total = torch.cuda.mem_get_info(self._device)
        return MemorySnapshot(
            total=total,
            free=free,
            held=torch.cuda.memory_allocated(self._device) + self._held_bytes,
            peak=torch.cuda.max_memory_allocated(self._device) + self._held_bytes,
        )

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def lacks(self, start: MemorySnapshot, utilization: float, needed_bytes: int) -> str | None:
        asked = int(start.total * utilization)
        room = start.free + self._found_bytes
        if room >= max(asked, needed_bytes):
            return None
        name = f"{self._device} ({torch.cuda.get_device_name(self._device)})"
        free = f"{room >> 20} MiB of the {start.total >> 20} MiB of {name} are free"
        if needed_bytes > asked:
            return (
                f"{free}, and this worker needs {needed_bytes >> 20} MiB: divide the model over more devices, or keep "
                "weights in host memory by cpu_offload_gb"
            )
        return (
            f"{free}, and gpu_memory_utilization {utilization:g} asks for {asked >> 20} MiB: lower it, or end what "
            "else uses the device"
        )

    def kv_bytes(self, start: MemorySnapshot, utilization: float, weights_bytes: int, full_bytes: int) -> int:
        """The configured share, less the peak of weights and the profiling step, less a reserve.

        CUDA graphs of steps with prompts need their part of the profiling step's memory once more.
        """
        del full_bytes
        now = self.snapshot()
        requested = int(now.total * utilization)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        before = start.total - start.free - self._found_bytes
        outside = (total - free) - torch.cuda.memory_reserved(self._device) - self._held_bytes - before
        captured = int(self._captured_share() * max(0, now.peak - weights_bytes))
        logger.debug(
            "memory: %d MiB asked for, less %d MiB of weights, %d MiB of the largest step, %d MiB of captured prompts, "
            "%d MiB outside of torch and a reserve of %d MiB",
            requested >> 20, weights_bytes >> 20, (now.peak - weights_bytes) >> 20, captured >> 20,
            max(0, outside) >> 20, RESERVE_BYTES >> 20,
        )  # fmt: skip
        return requested - now.peak - captured - max(0, outside) - RESERVE_BYTES
