"""How layers are grouped over the KV cache's pools, how large blocks and pools are, and how many a request holds.

Arithmetic on `kv`'s data alone, so that worker, scheduler and predictions agree. Knows no tensor.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from .kv import AnyKVSpec, KVGroup, KVLayout, StateKV

if TYPE_CHECKING:
    from .attention import CacheBackend
    from .latent import CacheSpec

#: Tokens of a block where neither the user nor a backend asks for another size.
AUTO_BLOCK_SIZE = 16
#: With states, this part of the memory beside those of running requests holds states that stand for prefixes.
CHECKPOINT_SHARE = 1 / 4
#: The most of these for each running request, where nothing else needs the memory.
_MOST_CHECKPOINTS = 16
#: Element types of different widths view one block, so the place of each is a multiple of this many bytes.
_ALIGNMENT = 64


def plan_layout(
    specs: Mapping[str, AnyKVSpec], block_size: int = 0, block_multiples: Mapping[str, int] | None = None
) -> KVLayout:
    """The KV groups of layers that keep `specs`, and their block sizes; the pools have no blocks yet.

    A group's block is of `block_size` tokens, or 16 where that is 0, rounded up to a common multiple with the
    `block_multiples` of its layers. A group that needs fewer bytes for a token gets blocks longer by a power of two,
    so that the blocks of all groups have about equal bytes: each more than half of the largest.
    """
    kinds: dict[tuple[str, int], list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec.retention, []).append(name)
    states = [name for name, spec in specs.items() if isinstance(spec, StateKV)]
    parts, tokens = list[list[str]](), [names for names in kinds.values() if names != states]
    length = _group_length([len(names) for names in tokens])
    for names in tokens:
        # the widest layers of all groups share the first layer slots
        ordered = sorted(names, key=lambda name: -specs[name].block_bytes(1))
        count = -(-len(names) // length)
        parts += [ordered[index::count] for index in range(count)]
    sizes = _block_sizes(parts, specs, block_size or AUTO_BLOCK_SIZE, block_multiples or {})
    groups = [_group(names, specs, size) for names, size in zip(parts, sizes, strict=True)]
    if states:
        groups.append(_group(states, specs, 0, pool=1))
    pools = (1,) * (1 + bool(states))
    return KVLayout(groups=tuple(groups), pools=pools, block_size=math.gcd(*sizes) or 1, grain=math.lcm(*sizes))


def with_checkpoints(layout: KVLayout) -> KVLayout:
    """The layout with states kept where prefixes end: of every grain, or every 16 tokens if no layer keeps tokens."""
    keeps_tokens = any(not group.keeps_states for group in layout.groups)
    interval = layout.grain if keeps_tokens else AUTO_BLOCK_SIZE
    groups = tuple(replace(one, block_size=interval) if one.keeps_states else one for one in layout.groups)
    if keeps_tokens:
        return replace(layout, groups=groups)
    return replace(layout, groups=groups, block_size=interval, grain=interval)


def _group(names: Sequence[str], specs: Mapping[str, AnyKVSpec], block_size: int, pool: int = 0) -> KVGroup:
    kept = tuple(specs[name] for name in names)
    return KVGroup(specs=kept, layers=tuple(names), block_size=block_size, pool=pool)


def _block_sizes(
    groups: Collection[Sequence[str]], specs: Mapping[str, AnyKVSpec], least: int, multiples: Mapping[str, int]
) -> list[int]:
    sizes = [math.lcm(least, *(multiples.get(name, 1) for name in names)) for names in groups]
    widths = [max(specs[name].block_bytes(size) for name in names) for names, size in zip(groups, sizes, strict=True)]
    return [size << ((max(widths) // width).bit_length() - 1) for size, width in zip(sizes, widths, strict=True)]


def _group_length(counts: Sequence[int]) -> int:
    """How many layers a group has at most, for so many layers of each retention.

    That of the rarest, so that no layer slot stays empty in most groups (five sliding layers to one full one give six
    groups that share one pool evenly), or of the most frequent one where that is little more.
    """
    least, most = min(counts, default=1), max(counts, default=1)
    return most if most <= 1.5 * least else least


def slot_bytes(layout: KVLayout, pool: int) -> list[int]:
    """Bytes of a block of `pool` in each layer slot: those of the widest layer there."""
    widths: list[int] = []
    for group in layout.groups:
        if group.pool == pool:
            widths += [0] * (len(group.layers) - len(widths))
            for index, spec in enumerate(group.specs):
                width = -(-spec.block_bytes(group.block_size) // _ALIGNMENT) * _ALIGNMENT
                widths[index] = max(widths[index], width)
    return widths


def part_of(layout: KVLayout, layers: Collection[str]) -> KVLayout:
    """The layout with `layers` alone, numbered anew; its groups stay, even where they have no layer left."""
    groups = []
    for group in layout.groups:
        kept = [(name, spec) for name, spec in zip(group.layers, group.specs, strict=True) if name in layers]
        groups.append(replace(group, layers=tuple(name for name, _ in kept), specs=tuple(spec for _, spec in kept)))
    return replace(layout, groups=tuple(groups))


def pool_bytes(layout: KVLayout) -> tuple[int, ...]:
    """Bytes of a block of each pool, over all layer slots."""
    return tuple(sum(slot_bytes(layout, pool)) for pool in range(len(layout.pools)))


def full_bytes(
    layout: KVLayout, num_requests: int, max_model_len: int, bytes_of_pools: Sequence[int] | None = None
) -> int:
    """Bytes that `num_requests` of `max_model_len` tokens need, null blocks included.

    `bytes_of_pools` are as for `with_blocks`.
    """
    blocks = 1 + num_requests * sum(group.blocks_for(max_model_len) for group in layout.groups if group.pool == 0)
    tokens, *states = bytes_of_pools or pool_bytes(layout)
    running = (1 + num_requests) * sum(states)
    if not _keeps_prefixes(layout):
        return blocks * tokens + running
    # with what stands for prefixes beside, so that a single request has room at its full length too
    return math.ceil(blocks * tokens / (1 - CHECKPOINT_SHARE)) + running + num_requests * sum(states)


def with_blocks(
    layout: KVLayout,
    available_bytes: int,
    override: int | None = None,
    *,
    num_states: int = 1,
    bytes_of_pools: Sequence[int] | None = None,
) -> KVLayout:
    """The layout with states for `num_states` requests, and as many blocks of tokens as fit, or exactly `override`.

    Where states stand for prefixes too, `CHECKPOINT_SHARE` of what is left is theirs.

    `bytes_of_pools` are the bytes of a block of each pool (see `pool_bytes`) where they are not those of all layers.
    Raises `ValueError` when not even two blocks fit. A model that keeps no tokens has two blocks of no bytes.
    """
    tokens, *states = bytes_of_pools or pool_bytes(layout)
    for_states = (1 + num_states) * sum(states)
    kept = _num_checkpoints(layout, available_bytes - for_states, override, num_states, (tokens, sum(states)))
    left = available_bytes - for_states - kept * sum(states)
    num_blocks = override or (left // tokens if tokens else 2)
    if num_blocks < 2 or (not override and available_bytes < for_states):
        of_states = f" and the states of {num_states} requests" if states else ""
        raise ValueError(
            f"the KV cache gets {available_bytes} bytes, its least, two blocks of {layout.grain} tokens{of_states}, "
            f"takes {2 * tokens + for_states}: raise gpu_memory_utilization or kv_cache_memory_bytes, or choose a "
            f"smaller {'max_num_seqs' if states else 'block_size'}"
        )
    return replace(layout, pools=(int(num_blocks), *(1 + num_states + kept for _ in states)))


def common_pools(pools: Iterable[Sequence[int]], block_bytes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The blocks of each pool for which all workers have room, from those of each and its bytes of one.

    A worker whose layers keep nothing in a pool has room for any number of its blocks.
    """
    found = zip(zip(*pools, strict=True), zip(*block_bytes, strict=True), strict=True)
    return tuple(min([count for count, size in zip(*one, strict=True) if size] or one[0]) for one in found)


def _keeps_prefixes(layout: KVLayout) -> bool:
    """Whether states stand for prefixes."""
    return any(group.keeps_states and group.block_size for group in layout.groups)


def _num_checkpoints(
    layout: KVLayout, free_bytes: int, override: int | None, num_states: int, pools: tuple[int, int]
) -> int:
    """How many states are kept for prefixes; `pools` are the bytes of a block of tokens and of all states."""
    tokens, state = pools
    if not state or not _keeps_prefixes(layout):
        return 0
    if override:
        return max(num_states, int(override * tokens * CHECKPOINT_SHARE / (1 - CHECKPOINT_SHARE)) // state)
    if not tokens:
        return max(0, min(free_bytes // state, _MOST_CHECKPOINTS * num_states))
    return max(0, min(int(free_bytes * CHECKPOINT_SHARE), free_bytes - 2 * tokens) // state)


def blocks_needed(layout: KVLayout, num_tokens: int, num_encoded: int | None = None) -> int:
    """The most blocks of tokens, over all groups, that a request of `num_tokens` tokens must hold at once.

    It has `num_encoded` encoder tokens besides, as many where that is None.
    """
    encoded = num_tokens if num_encoded is None else num_encoded
    return sum(
        group.specs[0].max_live_blocks(group.block_size, encoded if group.keeps_encoded else num_tokens)
        for group in layout.groups
        if group.pool == 0
    )


def max_request_len(layout: KVLayout, limit: int) -> int:
    """The longest request (prompt and output, at most `limit`) that the whole cache can hold; 0 when none fits."""
    # the last token is never fed back, so it needs no place
    return bisect_right(range(1, limit + 1), layout.pools[0] - 1, key=lambda length: blocks_needed(layout, length - 1))


def why_not_served(backend: type[CacheBackend], spec: CacheSpec, block_size: int) -> str | None:
    """Why `backend` cannot serve `spec` in blocks of `block_size` tokens (0: the backend chooses); None if it can."""
    if not isinstance(spec, backend.spec_type):
        return f"it serves {backend.spec_type.__name__}, not {type(spec).__name__}"
    multiple = backend.block_multiple(spec) * spec.context.ranks
    if block_size % multiple:
        return (
            f"its blocks hold a multiple of {multiple} tokens, and block_size is {block_size}: set it to auto, or to "
            f"{multiple}, or choose another backend"
        )
    size = block_size or math.lcm(AUTO_BLOCK_SIZE, multiple)
    return backend.supports(dataclasses.replace(spec, block_size=size // spec.context.ranks))
