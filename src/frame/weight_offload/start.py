"""Makes what keeps a worker's weights in host memory, as its settings say."""

from __future__ import annotations

import logging

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.platform import Platform

from .choice import GIB
from .null import NO_OFFLOAD, NoOffload
from .offload import WeightOffload

logger = logging.getLogger("frame.worker")


def weight_offload(config: FrameConfig, platform: Platform) -> NoOffload:
    """The null object where nothing is kept; raises `ValueError` where it cannot work with other settings."""
    settings = config.weight_offload
    if not settings.cpu_offload_gb:
        return NO_OFFLOAD
    if config.expert_balance.enable_eplb:
        raise ValueError("cpu_offload_gb: experts that are balanced (enable_eplb) must lie on the device")
    if config.executor.enable_expert_parallel and config.data_parallel.data_parallel_size > 1:
        raise ValueError(
            "cpu_offload_gb: engines that share experts (enable_expert_parallel with data_parallel_size) compute them "
            "for one another at any time, so that they must lie on the device"
        )
    memory = platform.memory()
    if not memory.offloads:
        logger.info(
            "cpu_offload_gb has no effect on platform %r: its weights stay where they are",
            platform.setup.plugin or platform.device_type,
        )
        return NO_OFFLOAD
    budget = int(settings.cpu_offload_gb * GIB)
    queue = platform.streams().side_queue()
    return WeightOffload(budget, settings.cpu_offload_ahead, memory, queue, platform.device)
