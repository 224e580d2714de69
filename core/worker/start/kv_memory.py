"""The KV cache's memory: the allocated pools, and the views of them that layers get.

Knows block ids as numbers only; who owns them is the engine's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...interfaces.attention import BlockFormat, CacheBackend
from ...interfaces.kv import KVLayout
from ...interfaces.kv_layout import slot_bytes
from ...interfaces.latent import CacheSpec


class KVMemory:
    """The allocated pools: of each one tensor of raw bytes for each layer slot, `[num_blocks, slot's bytes]`."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.layout = layout
        # Zeroed: padding rows read the null block, and what they read must be finite.
        self._pools = [
            [torch.zeros((count, width), dtype=torch.uint8, device=device) for width in slot_bytes(layout, pool)]
            for pool, count in enumerate(layout.pools)
        ]
        self.slots = [slot for slots in self._pools for slot in slots]

    def layer_bytes(self) -> dict[str, Tensor]:
        """Layer name → uint8 [num_blocks, block_bytes]: what connectors move."""
        return {
            layer: self._pools[group.pool][index].narrow(1, 0, spec.block_bytes(group.block_size))
            for group in self.layout.groups
            for index, (layer, spec) in enumerate(zip(group.layers, group.specs, strict=True))
        }

    def layer_block(self, layer: str, backend: type[CacheBackend], spec: CacheSpec) -> tuple[Tensor, BlockFormat]:
        """The raw cache of one layer, uint8 [num_blocks, block_bytes], and how its backend lays out a block.

        Raises `ValueError` where the format does not fill a block.
        """
        memory, block = self.layer_bytes()[layer], backend.kv_format(spec)
        if block.num_bytes != memory.shape[1]:
            raise ValueError(
                f"{backend.__name__}.kv_format gives a block of {block.num_bytes} bytes, shape {block.shape} of "
                f"{block.dtype}; a block of layer {layer!r} has {memory.shape[1]}"
            )
        return memory, block
