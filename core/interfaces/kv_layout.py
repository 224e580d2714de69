"""How layers are grouped over the KV cache's pool, how large the pool is, and how many blocks a request holds.

Arithmetic on `kv`'s data alone, so that worker, scheduler and predictions agree. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .kv import AnyKVSpec, ChunkedKV, KVGroup, KVLayout, KVSpec, SlidingKV, StateKV


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


def max_live_blocks(spec: KVSpec, block_size: int, num_tokens: int) -> int:
    """The most blocks of one group that a request of `num_tokens` must hold at once, computed token by token."""
    whole = -(-num_tokens // block_size)
    if isinstance(spec, StateKV):
        return 1
    if isinstance(spec, SlidingKV):
        return min(whole, -(-(spec.window - 1) // block_size) + 1)
    if isinstance(spec, ChunkedKV):
        return min(whole, -(-spec.chunk // block_size) + 1)
    return whole


def blocks_needed(layout: KVLayout, num_tokens: int) -> int:
    """The most blocks, over all groups, that a request of `num_tokens` tokens in the cache must hold at once."""
    return sum(max_live_blocks(group.spec, layout.block_size, num_tokens) for group in layout.groups)


def max_request_len(layout: KVLayout, limit: int) -> int:
    """The longest request (prompt and output, at most `limit`) that the whole cache can hold; 0 when none fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        # the last token is never fed back, so it needs no place
        if blocks_needed(layout, middle - 1) <= layout.num_blocks - 1:
            low = middle
        else:
            high = middle - 1
    return low
