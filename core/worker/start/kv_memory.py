"""The KV cache's memory: the allocated pool, and the views of it that layers get.

Knows block ids as numbers only; who owns them is the engine's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...interfaces.attention import AttentionBackend, AttentionSpec
from ...interfaces.kv import KVLayout

NULL_BLOCK = 0


class KVMemory:
    """The allocated pool: one piece of raw bytes per layer slot, `[num_blocks, page_bytes]`."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.layout = layout
        shape = (layout.num_blocks, layout.page_bytes)
        # Zeroed: padding rows read the null block, and what they read must be finite.
        self.slots = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layout.num_slots)]

    def layer_bytes(self) -> dict[str, Tensor]:
        """Layer name → uint8 [num_blocks, block_bytes]: what connectors move."""
        return {
            layer: self.slots[index].narrow(1, 0, group.spec.block_bytes(group.block_size))
            for group in self.layout.groups
            for index, layer in enumerate(group.layers)
        }

    def layer_view(self, layer: str, backend: type[AttentionBackend], spec: AttentionSpec) -> Tensor:
        """The cache of one layer in the backend's logical shape; a block is contiguous in memory."""
        shape, order = backend.kv_shape(self.layout.num_blocks, spec), backend.kv_stride_order()
        if shape[order[0]] != self.layout.num_blocks:
            raise ValueError(f"{backend.__name__} puts axis {order[0]} first in memory; the block axis must come first")
        flat = self.layer_bytes()[layer].view(spec.kv_dtype)
        memory: Tensor = flat.unflatten(1, [shape[axis] for axis in order[1:]])
        return memory.permute([order.index(axis) for axis in range(len(shape))])
