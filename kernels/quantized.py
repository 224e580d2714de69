"""Products with quantised weights in Triton; the references are `Ops.scaled_linear` and `Ops.packed_linear`.

Codes are int8, 8-bit floats or nibbles (eight in an int32, the first in its lowest bits), scales float32 or 16-bit
floats of blocks of rows and columns. Few rows of x read the codes once, which takes as long as reading them; many rows
are rounded to codes as well where the caller asks for it, else the weight is dequantised first (`dequantize`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained

#: The most rows of x that are multiplied without rounding them or storing the weight.
FEW_ROWS = 64
#: Columns of a step at most, and at least: a matrix instruction multiplies no fewer.
_MOST_COLUMNS, _LEAST_COLUMNS = 128, 16
#: Row tiles whose programs run side by side, so that they read the same weights from the cache.
_GROUP = 8
#: Columns of x that share a scale where weights have scales of blocks.
X_GROUP = 128


@triton.jit
def _numbers(codes, zeros, row, there, first, depth, scale_at, NIBBLES: tl.constexpr, ZEROS: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of `dtype`: the codes of rows from column `first` on, less their zeros."""
    if NIBBLES:
        word = first // 8 + tl.arange(0, BLOCK_K // 8)
        kept = there[:, None] & (word < depth // 8)[None, :]
        words = tl.load(codes + row[:, None] * (depth // 8) + word[None, :], mask=kept, other=0)
        found = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
        found = tl.reshape(found, (BLOCK_N, BLOCK_K))
        if not ZEROS:
            found -= 8
    else:
        lane = first + tl.arange(0, BLOCK_K)
        kept = there[:, None] & (lane < depth)[None, :]
        found = tl.load(codes + row[:, None] * depth + lane[None, :], mask=kept, other=0.0)
    if ZEROS:
        found = found.to(tl.int32) - tl.load(zeros + scale_at, mask=there, other=0).to(tl.int32)[:, None]
    return found.to(dtype)


@triton.jit
def _few_rows(
    x, codes, scales, zeros, bias, out, rows, outputs, depth, groups, stride_x,
    GROUP: tl.constexpr, ROWS_PER: tl.constexpr, NIBBLES: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # GROUP 0: one scale for all columns, which multiplies the sum
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < outputs
    wide = column.to(tl.int64)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_K)
    scale_row = wide // ROWS_PER * groups
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, depth, BLOCK_K):
        kept = (row < rows)[:, None] & (first + lane < depth)[None, :]
        a = tl.load(x + row.to(tl.int64)[:, None] * stride_x + (first + lane)[None, :], mask=kept, other=0.0)
        scale_at = scale_row
        if GROUP:
            scale_at = scale_row + first // GROUP
        w = _numbers(codes, zeros, wide, there, first, depth, scale_at, NIBBLES, ZEROS, BLOCK_N, BLOCK_K, a.dtype)
        part = tl.dot(a, tl.trans(w), input_precision="ieee")
        if GROUP:
            part *= tl.load(scales + scale_at, mask=there, other=0.0).to(tl.float32)[None, :]
        acc += part
    if not GROUP:
        acc *= tl.load(scales + scale_row, mask=there, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        acc += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & there[None, :])


@triton.jit
def _dequantize(
    codes, scales, zeros, out, rows, depth, scale_rows, groups,
    GROUP: tl.constexpr, ROWS_PER: tl.constexpr, NIBBLES: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    there = row < rows
    scale_at = (matrix * scale_rows + row // ROWS_PER) * groups
    if GROUP:
        scale_at += first // GROUP
    w = _numbers(
        codes, zeros, matrix * rows + row, there, first, depth, scale_at, NIBBLES, ZEROS, BLOCK_N, BLOCK_K, tl.float32
    )
    w *= tl.load(scales + scale_at, mask=there, other=0.0).to(tl.float32)[:, None]
    lane = first + tl.arange(0, BLOCK_K)
    at = out + (matrix * rows + row)[:, None] * depth + lane[None, :]
    tl.store(at, w.to(out.dtype.element_ty), mask=there[:, None] & (lane < depth)[None, :])


@triton.jit
def _round_rows(
    x, static, codes, scales, depth, stride_x, MOST: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr,
    FLOATS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    column = group * GROUP + lane
    kept = (lane < GROUP) & (column < depth)
    values = tl.load(x + row * stride_x + column, mask=kept, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static)
    else:
        scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / MOST
    values = tl.minimum(tl.maximum(values / scale, -MOST), MOST)
    if not FLOATS:
        values = tl.floor(values + 0.5)
    tl.store(codes + row * depth + column, values.to(codes.dtype.element_ty), mask=kept)
    tl.store(scales + row * tl.num_programs(1) + group, scale)


@triton.jit
def _rounded_product(
    x, x_scales, codes, scales, bias, out, rows, outputs, depth, x_groups, groups,
    X_GROUP: tl.constexpr, GROUP: tl.constexpr, ROWS_PER: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    program = tl.program_id(0)
    band = program // (SIDE_BY_SIDE * column_tiles)
    several = tl.minimum(row_tiles - band * SIDE_BY_SIDE, SIDE_BY_SIDE)
    inside = program % (SIDE_BY_SIDE * column_tiles)
    row = (band * SIDE_BY_SIDE + inside % several) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = inside // several * BLOCK_N + tl.arange(0, BLOCK_N)
    there, lane = column < outputs, tl.arange(0, BLOCK_K)
    # rows outside of a matrix read its first one instead; their results are not stored
    x_row = tl.where(row < rows, row, 0).to(tl.int64)
    w_row = tl.where(there, column, 0).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, depth, BLOCK_K):
        kept = (first + lane < depth)[None, :]
        a = tl.load(x + x_row[:, None] * depth + (first + lane)[None, :], mask=kept, other=0.0)
        w = tl.load(codes + w_row[:, None] * depth + (first + lane)[None, :], mask=kept, other=0.0)
        part = tl.dot(a, tl.trans(w)).to(tl.float32)
        if GROUP:
            part *= tl.load(scales + w_row // ROWS_PER * groups + first // GROUP).to(tl.float32)[None, :]
        if X_GROUP:
            part *= tl.load(x_scales + x_row * x_groups + first // X_GROUP)[:, None]
        acc += part
    if not GROUP:
        acc *= tl.load(scales + w_row // ROWS_PER * groups).to(tl.float32)[None, :]
    if not X_GROUP:
        acc *= tl.load(x_scales + x_row)[:, None]
    if BIAS:
        acc += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & there[None, :])


def columns_of_step(group: int, depth: int, groups: int) -> int:
    """The columns that a step multiplies, so that they have one scale; 0 for groups that no step fits."""
    if groups == 1:
        return 64
    size = min(group & -group, _MOST_COLUMNS)
    return size if size >= _LEAST_COLUMNS else 0


def few_rows(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    """x Wᵀ + b for x [rows, K], its columns contiguous, and codes [N, K], or nibbles int32 [N, K / 8]; one launch."""
    rows, depth = x.shape
    outputs, groups = len(codes), scales.shape[-1]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    block_m = 16 if rows <= 16 else 32
    grid = (triton.cdiv(outputs, 32), triton.cdiv(rows, block_m))
    _few_rows[grid](
        x, codes, scales, zeros, bias, out, rows, outputs, depth, groups, x.stride(0),
        GROUP=block[1] if groups > 1 else 0, ROWS_PER=block[0], NIBBLES=codes.dtype == torch.int32,
        ZEROS=zeros is not None, BIAS=bias is not None,
        BLOCK_M=block_m, BLOCK_N=32, BLOCK_K=columns_of_step(block[1], depth, groups), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def dequantize(
    codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[..., N, K] of `dtype`, of codes [..., N, K], or of nibbles int32 [..., N, K / 8]; contiguous."""
    nibbles = codes.dtype == torch.int32
    rows, depth = codes.shape[-2], codes.shape[-1] * (8 if nibbles else 1)
    groups = scales.shape[-1]
    out = torch.empty((*codes.shape[:-1], depth), dtype=dtype, device=codes.device)
    step = columns_of_step(block[1], depth, groups)
    grid = (triton.cdiv(rows, 32), triton.cdiv(depth, step), max(1, codes.numel() // max(1, codes.shape[-1] * rows)))
    _dequantize[grid](
        codes, scales, zeros, out, rows, depth, scales.shape[-2], groups,
        GROUP=block[1] if groups > 1 else 0, ROWS_PER=block[0], NIBBLES=nibbles, ZEROS=zeros is not None,
        BLOCK_N=32, BLOCK_K=step, num_warps=4,
    )  # fmt: skip
    return out


def round_rows(
    x: Tensor, dtype: torch.dtype, group: int, static: Tensor | None = None, *, chains: bool = False, room: int = 0
) -> tuple[Tensor, Tensor]:
    """(codes [rows, K], float32 scales [rows, ⌈K / group⌉]) of x [rows, K]; `static` [1] is the scale of all.

    With `chains`, the kernel after this one may begin early and has to wait, as in `frame.kernels.chain`. The memory of
    the codes is that of `room` rows at least.
    """
    rows, depth = x.shape
    groups = triton.cdiv(depth, group)
    codes = torch.empty((max(rows, room), depth), dtype=dtype, device=x.device)[:rows]
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    most = torch.finfo(dtype).max if dtype.is_floating_point else 127
    size = triton.next_power_of_2(min(group, depth))
    _round_rows[(rows, groups)](
        x, static, codes, scales, depth, x.stride(0), MOST=float(most), GROUP=group, STATIC=static is not None,
        FLOATS=dtype.is_floating_point, BLOCK=size, num_warps=min(16, max(1, size // 512)),
        **(chained(x.device) if chains else {"CHAINED": False}),
    )  # fmt: skip
    return codes, scales


def rounded_rows(x: Tensor, codes: Tensor, scales: Tensor, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `round_rows`, to the type of a weight's codes: in groups where the weight [N, K] has scales of groups."""
    by_groups = scales.shape[-1] > 1 and static is None
    return round_rows(x, codes.dtype, X_GROUP if by_groups else x.shape[1], static)


def rounded_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    bias: Tensor | None = None,
    static: Tensor | None = None,
) -> Tensor:
    """x Wᵀ + b for x [rows, K] that is rounded to the type of codes [N, K]: two launches."""
    rows, depth = x.shape
    outputs, groups = len(codes), scales.shape[-1]
    group = block[1] if groups > 1 else 0
    x_group = X_GROUP if group and static is None else 0
    found, own = rounded_rows(x, codes, scales, static)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    step = min(columns_of_step(block[1], depth, groups), X_GROUP) if group else 128
    block_m = 64 if rows <= 128 or group else 128  # sums of a step are kept apart where scales change
    _rounded_product[(triton.cdiv(rows, block_m) * triton.cdiv(outputs, 128),)](
        found, own, codes, scales, bias, out, rows, outputs, depth, own.shape[1], groups,
        X_GROUP=x_group, GROUP=group, ROWS_PER=block[0], SIDE_BY_SIDE=_GROUP, BIAS=bias is not None,
        BLOCK_M=block_m, BLOCK_N=128, BLOCK_K=step, num_warps=8 if block_m == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out
