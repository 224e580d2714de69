"""The KV cache's memory: the allocated pool, and the views of it that layers get.

Knows block ids as numbers only; who owns them is the engine's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...interfaces.attention import AttentionBackend, AttentionSpec, BlockFormat
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

    def layer_block(
        self, layer: str, backend: type[AttentionBackend], spec: AttentionSpec
    ) -> tuple[Tensor, BlockFormat]:
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
