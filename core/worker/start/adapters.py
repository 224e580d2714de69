"""Makes the adapters of a worker before its model, whose layers they wrap."""

from __future__ import annotations

import torch

from ...config.checkpoint import Checkpoint
from ...config.tree import FrameConfig
from ...interfaces.adapters import Adapters, NoAdapters
from ...interfaces.model import Model
from ...interfaces.platform import Platform
from ...interfaces.setup import AdapterSetup
from ...plugin_host.registry import Registry


def make_adapters(
    config: FrameConfig,
    checkpoint: Checkpoint,
    platform: Platform,
    registry: Registry,
    model: tuple[torch.dtype, type[Model]],
) -> Adapters:
    """The plugin that the configuration names; raises `ValueError` for a model that pools."""
    settings = config.adapters
    if not settings.enable_lora:
        return NoAdapters()
    if checkpoint.pooling is not None:
        raise ValueError("enable_lora: a pooling model serves no adapters; leave enable_lora out")
    dtype, model_class = model
    setup = AdapterSetup(
        max_adapters=settings.max_loras,
        max_rank=settings.max_lora_rank,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        device=platform.device,
        dtype=dtype,
        ops=platform.ops(),
        fully_sharded=settings.fully_sharded_loras,
        renames=model_class.renames,
        base_model=config.model.model,
        weights_move=config.weight_offload.cpu_offload_gb > 0,
    )
    provider = registry.select("adapters", settings.adapter_plugin, lambda plugin: None)
    made: Adapters = registry.make("adapters", provider, setup, config)
    return made
