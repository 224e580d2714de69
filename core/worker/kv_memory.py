"""The KV cache's memory: grouping layers over one pool, sizing it, and the views that layers get.

Knows block ids as numbers only; who owns them is the engine's business.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from ..interfaces.attention import AttentionBackend, AttentionSpec
from ..interfaces.kv import AnyKVSpec, KVGroup, KVLayout

NULL_BLOCK = 0


def group_layers(specs: Mapping[str, AnyKVSpec], block_size: int) -> tuple[KVGroup, ...]:
    """Groups layers of equal spec so that every group fills about as many layer slots of the pool.

    With several kinds of layer the size of a group is that of the rarest kind, so that no slot stays empty in most
    groups (five sliding layers to one full one give six groups that share one pool evenly).
    """
    kinds: dict[AnyKVSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    if not kinds:
        return ()
    size = min(len(names) for names in kinds.values())
    if max(len(names) for names in kinds.values()) <= 1.5 * size:
        size = max(len(names) for names in kinds.values())
    groups = []
    for spec, names in kinds.items():
        count = -(-len(names) // size)
        for index in range(count):
            groups.append(KVGroup(spec=spec, layers=tuple(names[index::count]), block_size=block_size))
    return tuple(groups)


def plan_layout(groups: tuple[KVGroup, ...], numerics: str = "") -> KVLayout:
    """The pool's page size and layer slots; it has no blocks yet."""
    page_bytes = max((group.spec.block_bytes(group.block_size) for group in groups), default=0)
    # Element types of different widths view the same page: keep every page aligned for all of them.
    page_bytes = -(-page_bytes // 64) * 64
    num_slots = max((len(group.layers) for group in groups), default=0)
    return KVLayout(groups=groups, num_blocks=1, page_bytes=page_bytes, num_slots=num_slots, numerics=numerics)


def full_bytes(layout: KVLayout, num_requests: int, max_model_len: int) -> int:
    """Bytes that `num_requests` of `max_model_len` tokens need, the null block included."""
    blocks = 1 + num_requests * len(layout.groups) * -(-max_model_len // layout.block_size)
    return blocks * layout.page_bytes * layout.num_slots


def with_blocks(layout: KVLayout, available_bytes: int, override: int | None) -> KVLayout:
    """The layout with as many blocks as fit, or exactly `override`; raises when not even two fit.

    A model that keeps nothing has two blocks of no bytes.
    """
    per_block = layout.page_bytes * layout.num_slots
    num_blocks = override or (available_bytes // per_block if per_block else 2)
    if per_block and num_blocks < 2:
        raise ValueError(
            f"the KV cache gets {available_bytes} bytes, its least, two blocks of {layout.block_size} tokens, "
            f"takes {2 * per_block}: "
            "raise gpu_memory_utilization or kv_cache_memory_bytes, or choose a smaller block_size"
        )
    return msgspec.structs.replace(layout, num_blocks=int(num_blocks))


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
