"""The product of a linear layer with the same bits for a row in any batch; the reference is in `frame.core.ops.layers`.

An output is the sum over the depth in steps of one length, in order, in float32, in one program: no split of the depth,
and one kind of matrix instruction (tiles of 64 rows or more, which on Hopper is always the one of 64 rows and 16 of the
depth). Only the rows and outputs of a tile depend on the batch, and no sum depends on those; many rows
therefore go through `linear_hopper`, which sums in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .activation import silu_mul
from .hopper import hopper_kernel, is_copied

#: Elements of the depth in a step: one number for each type, since the order of a sum follows from it.
BLOCK_K = 64
BLOCK_K_WIDE = 32  # float32
_GROUP = tl.constexpr(8)  # tiles of rows that share a weight tile while it is in the L2 cache


@dataclass(frozen=True)
class Tile:
    """Rows and outputs of a program, its warps, and steps in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


#: (most rows, tile that serves them), as benchmarks/kernels/linear_invariant.py measured.
TILES: tuple[tuple[int, Tile], ...] = (
    (64, Tile(64, 32, 4, 8)),
    (128, Tile(64, 64, 4, 6)),
    (512, Tile(128, 128, 8, 4)),
    (1 << 62, Tile(128, 256, 8, 3)),
)
#: All tiles that the benchmark measures.
CANDIDATES: tuple[Tile, ...] = (
    Tile(64, 16, 4, 8), Tile(64, 32, 4, 6), Tile(64, 32, 4, 8), Tile(64, 64, 4, 4), Tile(64, 64, 4, 6),
    Tile(64, 128, 4, 4), Tile(64, 128, 4, 5), Tile(64, 256, 4, 4), Tile(64, 256, 8, 4), Tile(128, 64, 4, 4),
    Tile(128, 64, 8, 5), Tile(128, 128, 4, 4), Tile(128, 128, 8, 4), Tile(128, 128, 8, 5), Tile(128, 256, 8, 3),
    Tile(128, 256, 8, 4), Tile(256, 128, 8, 3), Tile(256, 128, 8, 4),
)  # fmt: skip
#: float32 is multiplied exactly, without matrix instructions: one tile for all batches.
WIDE_TILE = Tile(64, 64, 4, 2)
#: Products of more rows go through `linear_hopper` where it can serve them.
TWIN_ROWS = 64


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows, outputs, depth, stride_x, stride_weight,
    BIAS: tl.constexpr, COPIER: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs that run side by side serve row tiles of one group, so that they read the same weights from the cache.
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    program = tl.program_id(0)
    group = program // (_GROUP * column_tiles)
    several = tl.minimum(row_tiles - group * _GROUP, _GROUP)
    first_row = (group * _GROUP + program % (_GROUP * column_tiles) % several) * BLOCK_M
    first_column = program % (_GROUP * column_tiles) // several * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    if not COPIER:
        # Rows outside of the matrix read the first row instead; their results are not stored.
        x_at = x + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * stride_x + lane[None, :]
        w_at = weight + tl.where(column < outputs, column, 0).to(tl.int64)[:, None] * stride_weight + lane[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, depth, BLOCK_K):
        if COPIER:
            a = x.load([first_row, first])
            w = weight.load([first_column, first])
        elif EVEN:
            a = tl.load(x_at + first)
            w = tl.load(w_at + first)
        else:
            kept = (first + lane < depth)[None, :]
            a = tl.load(x_at + first, mask=kept, other=0.0)
            w = tl.load(w_at + first, mask=kept, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x [..., in_features] and weight [out_features, in_features], the last dimensions contiguous."""
    flat = _rows(x)
    out = hopper_product(flat, weight, bias)
    if out is None:
        out = tiled_product(flat, weight, bias)
    return out.view(*x.shape[:-1], len(weight))


def linear_silu_mul_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(a) · b of the halves a, b of `linear_invariant`, for x [rows, in_features]."""
    flat = _rows(x)
    out = hopper_product(flat, weight, bias, gated=True)
    return silu_mul(tiled_product(flat, weight, bias)) if out is None else out


def hopper_product(flat: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor | None:
    """`linear_hopper.product` of `flat` [rows, in_features]; None where it cannot serve them, or rows are few."""
    outputs = len(weight) // 2 if gated else len(weight)
    if len(flat) <= TWIN_ROWS or flat.device.type != "cuda" or outputs % 8:
        return None
    if flat.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != flat.dtype:
        return None
    if flat.stride(1) != 1 or weight.stride(1) != 1 or not (is_copied(flat) and is_copied(weight)):
        return None
    kernel = hopper_kernel(flat.device, "linear_hopper", "product")
    return None if kernel is None else kernel(flat, weight, bias, gated=gated)


def tiled_product(flat: Tensor, weight: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """The product of `flat` [rows, in_features] in Triton, on any chip.

    `tile` replaces the tile that `tile_for` chooses; it changes no bit of a 16-bit product.
    """
    rows, depth = flat.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=flat.dtype, device=flat.device)
    if not rows:
        return out
    wide = flat.dtype.itemsize > 2
    tile = tile or (WIDE_TILE if wide else tile_for(rows, outputs, num_multiprocessors(flat.device)))
    step = BLOCK_K_WIDE if wide else BLOCK_K
    copier = not wide and is_copied(flat) and is_copied(weight)
    left, right = flat, weight
    if copier:
        left = TensorDescriptor.from_tensor(flat, [tile.block_m, step])
        right = TensorDescriptor.from_tensor(weight, [tile.block_n, step])
    grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(outputs, tile.block_n),)
    _linear[grid](
        left, right, bias, out, rows, outputs, depth, flat.stride(0), weight.stride(0),
        BIAS=bias is not None, COPIER=copier, EVEN=depth % step == 0,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=step,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@lru_cache(maxsize=4096)
def tile_for(rows: int, outputs: int, programs: int) -> Tile:
    """The tile of TILES, made narrower as long as some multiprocessors would have no program."""
    tile = next(tile for most, tile in TILES if rows <= most)
    while tile.block_n > 32 and triton.cdiv(rows, tile.block_m) * triton.cdiv(outputs, tile.block_n) < programs:
        tile = replace(tile, block_n=tile.block_n // 2, num_stages=min(8, tile.num_stages + 1))
    return tile


def _rows(x: Tensor) -> Tensor:
    """x as [rows, in_features], the last dimension contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


@lru_cache(maxsize=16)
def num_multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a CUDA device; 1 of any other device."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
