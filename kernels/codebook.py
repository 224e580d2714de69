"""Weights of nibbles, put together in one launch; the reference of those of a table is `Ops.dequantize_table`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .nibbles import Nibbles, fits as groups_fit, nibble_weights, read_nibbles

#: Columns of a program.
_COLUMNS = 128


@triton.jit
def _table_weights(
    low, high, scales, minima, outer, table, numbers, out, rows, depth, groups,
    GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, HIGH: tl.constexpr, MINIMA: tl.constexpr,
    OUTER: tl.constexpr, EXPONENTS: tl.constexpr, NUMBERS: tl.constexpr, TABLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    there = row < rows
    own = row.to(tl.float32)
    if NUMBERS:
        own = tl.load(numbers + row, mask=there, other=0.0)
    words, more, factors, least, wide, least_wide = read_nibbles(
        low, high, scales, minima, outer, row, there, first, depth, groups,
        GROUP, SPAN, HIGH, MINIMA, OUTER, BLOCK_K,
    )  # fmt: skip
    weight = nibble_weights(
        words, more, factors, least, wide, least_wide, table, own,
        ZERO, HIGH, MINIMA, OUTER, EXPONENTS, NUMBERS, TABLE, SPAN, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    lane = first + tl.arange(0, BLOCK_K)
    at = out + row[:, None] * depth + lane[None, :]
    tl.store(at, weight.to(out.dtype.element_ty), mask=there[:, None] & (lane < depth)[None, :])


def fits(group: int) -> bool:
    """Whether the kernel takes groups of so many columns."""
    return groups_fit(group, _COLUMNS)


def dequantize(weight: Nibbles, dtype: torch.dtype) -> Tensor:
    """[..., N, K] of `dtype`, of a weight whose groups of columns `fits`."""
    depth, groups = weight.depth, weight.scales.shape[-1]
    out = torch.empty((*weight.low.shape[:-1], depth), dtype=dtype, device=weight.low.device)
    rows = weight.low.numel() // weight.low.shape[-1]
    _table_weights[(triton.cdiv(rows, 16), triton.cdiv(depth, _COLUMNS))](
        *weight.pointers, out, rows, depth, groups, **weight.sizes(_COLUMNS),
        BLOCK_N=16, BLOCK_K=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def dequantize_table(
    packed: Tensor, scales: Tensor, table: Tensor, numbers: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """[..., N, K] of `dtype` from contiguous tensors whose groups of columns `fits`."""
    return dequantize(Nibbles(packed, scales, table, numbers), dtype or torch.float32)
