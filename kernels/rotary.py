"""Rotary position embedding in Triton; the reference is in `frame.core.ops.rotary`. Query and key in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotary(
    query, key, positions, cos_sin, query_out, key_out,
    query_heads, key_heads, dim, half, q_token, q_head, k_token, k_head, stride_table,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    position = tl.load(positions + token)
    in_half = lane < half
    cos = tl.load(cos_sin + position * stride_table + lane, mask=in_half, other=0.0)
    sin = tl.load(cos_sin + position * stride_table + half + lane, mask=in_half, other=0.0)
    is_query = head < query_heads
    own = tl.where(is_query, head, head - query_heads)
    kept = (head < query_heads + key_heads) & in_half
    source = tl.where(is_query, query + token * q_token + own * q_head, key + token * k_token + own * k_head)
    width = tl.where(is_query, query_heads, key_heads)
    target = tl.where(is_query, query_out, key_out) + (token * width + own) * dim
    if INTERLEAVED:
        first_lane, second_lane = 2 * lane, 2 * lane + 1
    else:
        first_lane, second_lane = lane, lane + half
    first = tl.load(source + first_lane, mask=kept, other=0.0)
    second = tl.load(source + second_lane, mask=kept, other=0.0)
    cos, sin = cos.to(first.dtype), sin.to(first.dtype)
    # the reference rounds each product to the element type
    tl.store(target + first_lane, (first * cos).to(first.dtype) - (second * sin).to(first.dtype), mask=kept)
    tl.store(target + second_lane, (second * cos).to(first.dtype) + (first * sin).to(first.dtype), mask=kept)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)[None, :]
        left = (head < query_heads + key_heads) & (rest < dim)
        tl.store(target + rest, tl.load(source + rest, mask=left), mask=left)


def rotary(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """As `frame.core.ops.rotary.rotary`; the head dimension contiguous, any token and head strides."""
    tokens, query_heads, dim = query.shape
    key_heads, half = key.shape[1], cos_sin.shape[1] // 2
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if tokens:
        heads = min(8, triton.next_power_of_2(query_heads + key_heads))
        rest = dim - 2 * half
        _rotary[(tokens, triton.cdiv(query_heads + key_heads, heads))](
            query, key, positions, cos_sin, query_out, key_out,
            query_heads, key_heads, dim, half, query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            cos_sin.stride(0), HEADS=heads, HALF=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(rest) if rest else 0, INTERLEAVED=interleaved, num_warps=2,
        )  # fmt: skip
    return query_out, key_out
