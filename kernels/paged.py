"""What the attention kernels take together: a layer's cache, its rows, the scores' numbers and the layer's sizes.

Triton passes a tuple's members to a kernel one by one and specialises each as it would an argument of its own, also
where `do_not_specialize` or `do_not_specialize_on_alignment` name the tuple: what those are meant for stays an argument
of its own. A member that is None is left out, and code that asks for it is not compiled. No member may be called
`values` or `type`: Triton's own tuples have attributes of those names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor


class PagedCache(NamedTuple):
    """Keys and values [blocks, block size, KV heads, D] of a layer; strides in elements, that of D is 1."""

    key: Any
    value: Any
    stride_block: Any
    stride_token: Any
    stride_head: Any


class HeadScales(NamedTuple):
    """Scales of a cache of 8-bit floats, float32 [KV heads]; None where one number stands for all heads."""

    key: Any = None
    value: Any = None


class CacheScales(NamedTuple):
    """What keys and values are multiplied with before a cache of 8-bit floats stores them; or `heads` are divided by.

    The numbers are 1 where `heads` has scales.
    """

    inverse_key: Any
    inverse_value: Any
    heads: HeadScales


class Scores(NamedTuple):
    """How scores become weights: softmax(soft_cap · tanh(scale / soft_cap · q kᵀ) + slope · distance), times a scale.

    `soft_cap`, `sinks` [H] and `alibi_slopes` [H] are None where a layer has none. The output is multiplied with
    `value_scale`. What `heads` has of a KV head multiplies both scales.
    """

    scale: Any
    value_scale: Any
    soft_cap: Any
    sinks: Any
    alibi_slopes: Any
    heads: HeadScales


class Layer(NamedTuple):
    """Sizes of a layer that a kernel is compiled for.

    `groups` query heads share a KV head; `dim` is `head_dim` padded to a power of two; `window` 0 is none; `limit` is
    the largest number of a cache of 8-bit floats, 0 for other caches. The cache holds of each row the tokens at the
    positions that are `rank` modulo `ranks`; `window` and `block_size` count those.
    """

    groups: int
    head_dim: int
    dim: int
    block_size: int
    window: int
    limit: float
    ranks: int = 1
    rank: int = 0


class Rows(NamedTuple):
    """Rows [B] of one token each: where its key and value are stored, how many tokens the row has with it, its blocks.

    Programs may go through the rows in the order that `order` gives.
    """

    slots: Any
    seq_lens: Any
    block_table: Any
    stride_table: Any
    order: Any


class Projected(NamedTuple):
    """Queries [B, H, D], keys and values [B, KV heads, D] of new tokens; strides from token to token, in elements."""

    query: Any
    key: Any
    value: Any
    stride_query: Any
    stride_key: Any
    stride_value: Any


class Splitting(NamedTuple):
    """Whether a row is read in splits, room for the parts of a row, and how many of them are joined at once."""

    split: bool
    parts: int
    together: int


def paged_cache(kv_cache: Tensor) -> PagedCache:
    """`kv_cache` [2, blocks, block size, KV heads, D] as kernels take it."""
    return PagedCache(kv_cache[0], kv_cache[1], *kv_cache.stride()[1:4])


def cache_scales(key_scale: float | Tensor, value_scale: float | Tensor) -> CacheScales:
    """What a kernel divides keys and values by: numbers, or float32 [KV heads]."""
    heads = head_scales(key_scale, value_scale)
    return CacheScales(1.0 / _number(key_scale), 1.0 / _number(value_scale), heads)


def scores_of(
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_scale: float | Tensor,
    value_scale: float | Tensor,
) -> Scores:
    """How a kernel weighs keys and values that are divided by their scales: numbers, or float32 [KV heads]."""
    numbers = scale * _number(key_scale), _number(value_scale)
    return Scores(
        *numbers, soft_cap if soft_cap > 0 else None, sinks, alibi_slopes, head_scales(key_scale, value_scale)
    )


def _number(scale: float | Tensor) -> float:
    return 1.0 if isinstance(scale, Tensor) else scale


def head_scales(key_scale: float | Tensor, value_scale: float | Tensor) -> HeadScales:
    """Raises `ValueError` where keys and values have scales of different kinds."""
    if isinstance(key_scale, Tensor) != isinstance(value_scale, Tensor):
        raise ValueError("keys and values must both have one scale, or both one for each head")
    return HeadScales(key_scale, value_scale) if isinstance(key_scale, Tensor) else HeadScales()


def layer_of(query: Tensor, kv_cache: Tensor, window: int = 0, share: tuple[int, int] = (1, 0)) -> Layer:
    """The sizes of a layer with such queries [T, H, D]; `share` is (ranks, rank), of which ranks divide the window."""
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    dim = max(16, triton.next_power_of_2(head_dim))
    return Layer(query.shape[1] // kv_heads, head_dim, dim, block_size, window // share[0], limit_of(kv_cache), *share)


def limit_of(cache: Tensor) -> float:
    """The largest number that a cache of 8-bit floats holds, 0 for other caches."""
    return torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else 0.0
