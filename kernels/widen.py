"""Copies rows of a paged cache of 8-bit floats into pages of 16 bits, for kernels that multiply no others.

A prompt reads each key once for every 128 of its queries: to convert them once, and read twice as many bytes, costs
less than to convert them each time. Knows no request and no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .paged import head_scales, paged_cache

#: Numbers of a token's heads that a program copies at once.
_WIDTH = 1024


@triton.jit(do_not_specialize=["key_scale", "value_scale"], do_not_specialize_on_alignment=["seq_lens", "block_table"])
def _widen(
    cache, seq_lens, block_table, firsts, keys, values, key_scale, value_scale, by_head, stride_table, width,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    page, row = tl.program_id(0), tl.program_id(1)
    if page * BLOCK < tl.load(seq_lens + row):
        source = tl.load(block_table + row * stride_table + page).to(tl.int64) * cache.stride_block
        target = (tl.load(firsts + row) + page).to(tl.int64) * BLOCK * width
        token, column = tl.arange(0, TOKENS)[:, None], tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)[None, :]
        head = column // HEAD_DIM
        kept = (token < BLOCK) & (column < width)
        source += token * cache.stride_token + head * cache.stride_head + column % HEAD_DIM
        target += token * width + column
        key = tl.load(cache.key + source, mask=kept, other=0.0).to(tl.float32)
        value = tl.load(cache.value + source, mask=kept, other=0.0).to(tl.float32)
        if by_head.key is None:
            key *= key_scale
            value *= value_scale
        else:
            key *= tl.load(by_head.key + head, mask=column < width, other=0.0)
            value *= tl.load(by_head.value + head, mask=column < width, other=0.0)
        tl.store(keys + target, key.to(keys.dtype.element_ty), mask=kept)
        tl.store(values + target, value.to(values.dtype.element_ty), mask=kept)


def widen(
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    firsts: Tensor,
    *,
    num_pages: int,
    max_pages: int,
    dtype: torch.dtype,
    key_scale: float | Tensor,
    value_scale: float | Tensor,
) -> Tensor:
    """[2, num_pages, block size, KV heads, D] of `dtype`: page firsts[r] + j is block j of row r, times its scales.

    `kv_cache` [2, blocks, block size, KV heads, D]; `seq_lens` and `firsts` int32 [rows]; no row has more than
    `max_pages` blocks, and all together have at most `num_pages`. Scales are numbers, or both float32 [KV heads].
    """
    _, _, block_size, heads, head_dim = kv_cache.shape
    width = heads * head_dim
    out = torch.empty((2, num_pages, block_size, heads, head_dim), dtype=dtype, device=kv_cache.device)
    numbers = [1.0 if isinstance(scale, Tensor) else scale for scale in (key_scale, value_scale)]
    columns = min(_WIDTH, triton.next_power_of_2(width))
    _widen[(max_pages, len(seq_lens), triton.cdiv(width, columns))](
        paged_cache(kv_cache), seq_lens, block_table, firsts, out[0], out[1],
        *numbers, head_scales(key_scale, value_scale), block_table.stride(0), width,
        HEAD_DIM=head_dim, BLOCK=block_size, TOKENS=triton.next_power_of_2(block_size),
        WIDTH=columns, num_warps=4,
    )  # fmt: skip
    return out
