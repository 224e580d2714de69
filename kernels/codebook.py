"""Weights of nibbles that are codes of sixteen numbers, in one launch; the reference is `Ops.dequantize_table`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns of a program, and the sizes of groups that divide it or that it divides.
_COLUMNS = 128
_LEAST_GROUP = 8


@triton.jit
def _table_weights(
    packed, scales, table, numbers, out, rows, depth, groups,
    GROUP: tl.constexpr, SPAN: tl.constexpr, EXPONENTS: tl.constexpr, NUMBERS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # SPAN columns of a program share a scale
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    there = row < rows
    word = first // 8 + tl.arange(0, BLOCK_K // 8)
    kept = there[:, None] & (word < depth // 8)[None, :]
    words = tl.load(packed + row[:, None] * (depth // 8) + word[None, :], mask=kept, other=0)
    codes = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
    values = tl.reshape(tl.load(table + codes), (BLOCK_N, BLOCK_K // SPAN, SPAN))
    group = first // GROUP + tl.arange(0, BLOCK_K // SPAN)
    own = there[:, None] & (group < groups)[None, :]
    factors = tl.load(scales + row[:, None] * groups + group[None, :], mask=own, other=0.0)
    if EXPONENTS:
        factors = (factors.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    factors = factors.to(tl.float32)
    if NUMBERS:
        factors *= tl.load(numbers + row, mask=there, other=0.0)[:, None]
    weight = tl.reshape(values * factors[:, :, None], (BLOCK_N, BLOCK_K))
    lane = first + tl.arange(0, BLOCK_K)
    at = out + row[:, None] * depth + lane[None, :]
    tl.store(at, weight.to(out.dtype.element_ty), mask=there[:, None] & (lane < depth)[None, :])


def fits(group: int) -> bool:
    """Whether the kernel takes groups of so many columns."""
    return group % _COLUMNS == 0 or (_LEAST_GROUP <= group < _COLUMNS and _COLUMNS % group == 0)


def dequantize_table(
    packed: Tensor, scales: Tensor, table: Tensor, numbers: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """[..., N, K] of `dtype` from contiguous tensors whose groups of columns `fits`."""
    depth, groups = packed.shape[-1] * 8, scales.shape[-1]
    out = torch.empty((*packed.shape[:-1], depth), dtype=dtype or torch.float32, device=packed.device)
    rows, group = packed.numel() // packed.shape[-1], depth // groups
    _table_weights[(triton.cdiv(rows, 16), triton.cdiv(depth, _COLUMNS))](
        packed, scales, table, numbers, out, rows, depth, groups,
        GROUP=group, SPAN=min(group, _COLUMNS), EXPONENTS=scales.dtype == torch.uint8, NUMBERS=numbers is not None,
        BLOCK_N=16, BLOCK_K=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
