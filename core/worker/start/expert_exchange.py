"""Which exchange moves tokens to the ranks that hold their experts. Knows no layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import methodcaller

import torch

from ...config.tree import FrameConfig
from ...interfaces.collectives import Groups
from ...interfaces.experts import ExchangeSpec, ExpertExchange, ExpertSpec
from ...interfaces.platform import Platform
from ...interfaces.setup import ExchangeSetup
from ...plugin_host.registry import Registry


def exchange_maker(
    config: FrameConfig, registry: Registry, groups: Groups, platform: Platform, dtype: torch.dtype
) -> Callable[[ExpertSpec, int], ExpertExchange] | None:
    """Makes the exchange for layers with so many slots on each rank, one for all that are alike.

    None where the ranks that share experts have the same tokens. Raises `PluginError` with the reasons of each exchange
    that cannot be used.
    """
    expert, tensor = groups.expert.size, groups.tensor.size
    if expert in (1, tensor):
        return None
    if expert != groups.data.size * tensor:
        raise ValueError(f"{expert} ranks cannot share experts where {groups.data.size} data ranks have {tensor} each")

    @cache
    def made(hidden_size: int, top_k: int, slots_per_rank: int) -> ExpertExchange:
        spec = ExchangeSpec(
            hidden_size,
            top_k,
            slots_per_rank,
            num_ranks=expert,
            tensor_size=tensor,
            max_tokens=config.scheduler.max_num_batched_tokens,
            dtype=dtype,
            device_type=platform.device_type,
        )
        provider = registry.select("exchange", config.executor.expert_exchange, methodcaller("supports", spec))
        exchange: ExpertExchange = registry.make("exchange", provider, ExchangeSetup(spec, groups), config)
        return exchange

    return lambda spec, slots_per_rank: made(spec.hidden_size, spec.top_k, slots_per_rank)
