"""Attention references over a paged cache: readable first, the oracle for every backend."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_kv(x: Tensor, dtype: torch.dtype, scale: float | Tensor = 1.0) -> Tensor:
    """Keys or values [..., Hk, D] as a cache of `dtype` holds them.

    8-bit floats hold x · (1 / scale), clamped to the type's range; others ignore `scale`, a number or float32 [Hk].
    """
    if dtype.itemsize > 1:
        return x.to(dtype)
    limit, inverse = torch.finfo(dtype).max, 1.0 / scale
    return (x.float() * (inverse[:, None] if isinstance(inverse, Tensor) else inverse)).clamp(-limit, limit).to(dtype)


def dequantize_kv(x: Tensor, dtype: torch.dtype, scale: float | Tensor = 1.0) -> Tensor:
    """The keys or values [..., Hk, D] that `quantize_kv` stored as `x`, up to rounding, as `dtype`."""
    out = x.to(dtype)
    if isinstance(scale, Tensor):
        return out * scale[:, None].to(dtype) if x.dtype.itemsize == 1 else out
    return out * scale if x.dtype.itemsize == 1 and scale != 1.0 else out


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
) -> None:
    """Stores `key`, `value` [T, Hk, D] at `slot_mapping` int64 [T] (block · block_size + offset; negative: skipped).

    `kv_cache` [2, num_blocks, block_size, Hk, D], any strides; scales are as in `quantize_kv`.
    """
    kept = slot_mapping >= 0
    slots, block_size = slot_mapping[kept], kv_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    kv_cache[0, block, offset] = quantize_kv(key[kept], kv_cache.dtype, key_scale)
    kv_cache[1, block, offset] = quantize_kv(value[kept], kv_cache.dtype, value_scale)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
) -> Tensor:
    """Causal attention of each row's last query_len tokens over its seq_len cached tokens, in float32.

    `query` [T, H, D], `kv_cache` [2, num_blocks, block_size, Hk, D], `query_start` [B+1], `seq_lens` [B],
    `block_table` [B, max_blocks]. `sinks` [H] are logits that take part in the softmax without a value;
    `alibi_slopes` [H] add slope · (key position - query position). A cache of 8-bit floats holds keys and values
    divided by the scales. Returns [T, H, D].
    """
    out = torch.zeros_like(query)
    block_size, groups = kv_cache.shape[2], query.shape[1] // kv_cache.shape[3]
    for row, length in enumerate(seq_lens.tolist()):
        start, end = int(query_start[row]), int(query_start[row + 1])
        if end == start:
            continue
        q_pos = torch.arange(length - (end - start), length, device=query.device)
        first = max(0, int(q_pos[0]) - window + 1) // block_size if window else 0
        blocks = block_table[row, first : -(-length // block_size)].long()
        k_pos = torch.arange(first * block_size, length, device=query.device)
        found = kv_cache[:, blocks].flatten(1, 2)[:, : len(k_pos)]
        keys = dequantize_kv(found[0], torch.float32, key_scale).repeat_interleave(groups, dim=1)
        values = dequantize_kv(found[1], torch.float32, value_scale).repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = q_pos[:, None] - k_pos[None, :]
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.float()[:, None, None] * distance
        hidden = distance < 0
        if window:
            hidden = hidden | (distance >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            probabilities = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            probabilities = scores.softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", probabilities, values).to(out.dtype)
    return out


def merge_parts(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over N disjoint sets of keys: outputs [N, T, H, D], float32 log-sum-exps [N, T, H].

    Returns (out [T, H, D] in the parts' dtype, log-sum-exp [T, H] over all keys), summed in float32 in order of parts.
    A log-sum-exp of -inf is an empty set, whose output is not looked at; without any key the output is zero.
    """
    total = torch.logsumexp(lses, 0)
    shares = (lses - torch.where(torch.isinf(total), torch.zeros_like(total), total)).exp().unsqueeze(-1)
    weighted = torch.where(shares > 0, parts.float() * shares, torch.zeros_like(shares))
    return weighted.sum(0).to(parts.dtype), total
