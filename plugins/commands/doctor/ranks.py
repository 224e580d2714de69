"""The prediction for an engine of several ranks: what each holds, and what its device has room for."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as with_pools

from frame.interfaces import KVLayout, common_pools, part_of, pool_bytes
from frame.settings import Checkpoint, EngineParts, FrameConfig, PluginError, RankPart, engine_parts
from frame.weight_offload.choice import KeptBytes

from .backends import multiples_of
from .layers import Shape
from .machine import Device
from .memory import (
    Budget,
    Sizes,
    copied_bytes,
    empty_layout,
    fitting_pools,
    graph_bytes,
    held_bytes,
    kv_budget,
    offloaded,
)


@dataclass(frozen=True)
class Rank:
    """One rank on its device; `block_bytes` are what a block of each pool of the cache takes there.

    `pools` are the blocks that its device has room for, none where it holds no request. `kept` are weights in host
    memory.
    """

    part: RankPart
    device: Device
    budget: Budget
    graph_bytes: int
    block_bytes: tuple[int, ...]
    pools: tuple[int, ...]
    kept: KeptBytes

    @property
    def fits(self) -> bool:
        """Whether the device has room for the weights and a cache, where the rank keeps one."""
        return bool(self.pools) and self.budget.kv_bytes >= 0

    @property
    def keeps(self) -> bool:
        """Whether layers of the rank keep anything of a request."""
        return any(self.block_bytes)

    @property
    def most_blocks(self) -> int:
        """Blocks of tokens that the device has room for; any number where the rank's layers keep none."""
        return sum(self.pools[:1]) if self.block_bytes[0] else sys.maxsize


@dataclass(frozen=True)
class Ranks:
    """All ranks of an engine, of which this machine has `num_engines`.

    The cache of each has as many blocks as the rank with the least room holds; `layout` is None where that is none.
    """

    all: tuple[Rank, ...]
    num_engines: int
    line: str
    layout: KVLayout | None
    unknown: str

    @property
    def shared_bytes(self) -> int:
        """Bytes of weights and cache of all ranks where engines share one memory, the CPU's; else 0."""
        pools = self.layout.pools if self.layout is not None else ()
        held = sum(rank.part.weights_bytes + held_bytes(pools, rank.block_bytes) for rank in self.all)
        return self.num_engines * held if self.all[0].device.kind == "cpu" else 0

    @property
    def poorest(self) -> Rank:
        """The rank that decides how many blocks all have."""
        keeping = [rank for rank in self.all if rank.keeps] or list(self.all)
        return min(keeping, key=lambda rank: (rank.fits, rank.most_blocks, -rank.part.weights_bytes))


def built_part(config: FrameConfig, checkpoint: Checkpoint, dtype: str) -> RankPart | None:
    """What the first rank holds, found by building the model without memory; None where no plugin serves it."""
    try:
        return engine_parts(config, checkpoint, dtype).ranks[0]
    except (PluginError, ValueError):  # told by whoever starts an engine of it
        return None


def predict_ranks(
    config: FrameConfig, checkpoint: Checkpoint, shape: Shape, sizes: Sizes, devices: Sequence[Device]
) -> Ranks:
    """What each rank holds, on `devices` by rank; raises `ConfigError` for a division that the model does not allow."""
    found: EngineParts = engine_parts(config, checkpoint, sizes.dtype)
    first = found.ranks[0]
    multiples, unknown = multiples_of(config, first.attention, devices[0])
    empty = empty_layout(config, first.kv_specs, multiples)
    ranks = tuple(_rank(config, checkpoint, shape, sizes, (part, devices[part.rank]), empty) for part in found.ranks)
    kept = [rank for rank in ranks if rank.keeps]
    layout = None
    if kept and all(rank.pools for rank in kept):
        pools = common_pools([rank.pools for rank in kept], [rank.block_bytes for rank in kept])
        layout = with_pools(empty, pools=pools)
    return Ranks(ranks, len(config.data_parallel.local_ranks), found.line, layout, unknown)


def _rank(
    config: FrameConfig,
    checkpoint: Checkpoint,
    shape: Shape,
    sizes: Sizes,
    placed: tuple[RankPart, Device],
    empty: KVLayout,
) -> Rank:
    part, device = placed
    kept = offloaded(config, device, part.layer_bytes)
    more = copied_bytes(device, sizes.dtype, part.tied) - kept.saved
    part = replace(part, weights_bytes=part.weights_bytes + more)
    own_bytes = pool_bytes(part_of(empty, part.own))
    shape = _own_shape(config, shape, part)
    vocabulary = checkpoint.vocab_size if part.is_last else 0  # logits are those of the last stage
    memory = (config, device, sizes, shape)
    budget = kv_budget(*memory, part.weights_bytes, empty, vocabulary, own_bytes)
    return Rank(
        part=part,
        device=device,
        budget=budget,
        graph_bytes=graph_bytes(*memory, vocabulary),
        block_bytes=own_bytes,
        pools=fitting_pools(config, sizes, empty, budget.kv_bytes, own_bytes),
        kept=kept,
    )


def _own_shape(config: FrameConfig, shape: Shape, part: RankPart) -> Shape:
    """The sizes of a step on one rank: of a layer's inner columns it has a part, unless it has whole experts."""
    divided = 1 if config.executor.enable_expert_parallel else config.executor.tensor_parallel_size
    inner = math.ceil(shape.intermediate_size / divided)
    return replace(shape, num_layers=len(part.layers), intermediate_size=inner, kv_specs=part.kv_specs)
