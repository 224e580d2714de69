"""Products of 2 to 16 rows with a weight, for Hopper, in Gluon.

Such a product takes as long as reading the weight once. A program computes 16 outputs, the rows of a matrix
instruction, so that even small weights make enough programs to keep the chip reading. The warps of a program divide the
inputs among them and add up their sums at the end; programs share no output. Weights arrive in a ring of bulk copies,
the first of them while the kernel before this one ends. The rows arrive in the same ring, since plain loads would wait
behind all the weights that are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .activation import silu_times
from .barriers import barrier
from .chain import await_previous, chained

#: The most rows of x; rows of a tile that x lacks are read as zeros and not stored.
ROWS = 16
#: Outputs of a program: the rows of a matrix instruction.
BLOCK_N = 16
#: Inputs that a warp multiplies in a step: 128 bytes, the widest swizzle of a bulk copy.
WIDTH = 64


@dataclass(frozen=True)
class RowsTile:
    """The warps of a program, each of which multiplies 64 inputs of a step, and the steps that the ring holds."""

    warps: int
    stages: int


#: Tiles that benchmarks measure; `tile_for` chooses among most of them.
CANDIDATES = (RowsTile(4, 4), RowsTile(4, 6), RowsTile(8, 3), RowsTile(8, 4))


@gluon.jit
def _fetch_weights(
    weight, tiles, ready, step, first_output, outputs,
    PARTS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begins the copies of a step's weights, and tells its barrier how many bytes come with them and with the rows."""
    stage = step % STAGES
    mbarrier.expect(ready.index(stage), WARPS * (PARTS * 16 + ROWS) * 64 * 2)
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(
            weight, [step * WARPS, first_output + part * outputs, 0], ready.index(stage),
            tiles.index(stage * PARTS + part),
        )  # fmt: skip


@gluon.jit
def _fetch_rows(x, tiles, ready, step, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """Begins the copy of a step's rows."""
    stage = step % STAGES
    tma.async_copy_global_to_shared(x, [step * WARPS, 0, 0], ready.index(stage), tiles.index(stage))


@gluon.jit
def _total(sums, bias, column, there, BIAS: gl.constexpr):
    """The sum over all warps, plus the bias."""
    total = gl.sum(sums, 0)
    if BIAS:
        total += gl.load(bias + column, mask=there, other=0.0).to(gl.float32)[:, None]
    return total


@gluon.jit(do_not_specialize=["rows", "steps"])
def _some_rows(
    x, weight, bias, out, rows, outputs, steps,
    GATED: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, CHAINED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 if GATED else 1
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    # Each thread loads 16 bytes of a row. Which inputs these are does not matter, since both operands agree.
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    weight_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS, num_warps, 16, 64], TILE)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, num_warps, ROWS, 64], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()
    first_output = gl.program_id(0) * 16
    for slot in gl.static_range(STAGES):
        _fetch_weights(weight, weight_tiles, ready, slot, first_output, outputs, PARTS, ROWS, STAGES, num_warps)
    sums = gl.zeros([num_warps, 16, ROWS], gl.float32, SUMS)
    ups = sums
    await_previous(CHAINED)
    for slot in gl.static_range(STAGES):
        _fetch_rows(x, x_tiles, ready, slot, STAGES, num_warps)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        values = x_tiles.index(stage).permute((0, 2, 1)).load(RIGHT)
        sums = mma_v2(weight_tiles.index(stage * PARTS).load(LEFT), values, sums)
        if GATED:
            ups = mma_v2(weight_tiles.index(stage * PARTS + 1).load(LEFT), values, ups)
        barrier()  # all warps have read the tiles that the next copies overwrite
        following = step + STAGES
        if following < steps:
            _fetch_weights(
                weight, weight_tiles, ready, following, first_output, outputs, PARTS, ROWS, STAGES, num_warps
            )
            _fetch_rows(x, x_tiles, ready, following, STAGES, num_warps)
    column = first_output + gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    there = column < outputs
    result = _total(sums, bias, column, there, BIAS)
    if GATED:
        result = silu_times(result, _total(ups, bias, outputs + column, there, BIAS), out.dtype.element_ty)
    gl.store(out + row * outputs + column[:, None], result.to(out.dtype.element_ty), mask=there[:, None] & (row < rows))


def tile_for(rows: int, outputs: int, inputs: int, *, gated: bool = False) -> RowsTile:
    """The tile of a launch, as measured on an H200: more warps where few programs read many inputs each."""
    warps = 8 if inputs >= max(2048, 32 * triton.cdiv(outputs, BLOCK_N)) else 4
    return RowsTile(warps, 4 if gated or warps == 8 or rows > 8 else 6)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: RowsTile | None = None, *, gated: bool = False
) -> Tensor:
    """x Wᵀ + b for x [up to 16 rows, inputs] and weight [outputs, inputs] of a 16-bit type; sums in float32.

    The inputs are a multiple of 64, and rows begin at multiples of 16 bytes. With `gated`, the result is silu(a) · b of
    the halves a, b, each of them rounded as if the product alone had been stored.
    """
    rows, inputs = x.shape
    if rows > ROWS:
        raise ValueError(f"x has {rows} rows; the kernel serves up to {ROWS}")
    outputs = len(weight) // 2 if gated else len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tile = tile or tile_for(rows, outputs, inputs, gated=gated)
    steps, room = triton.cdiv(inputs, WIDTH * tile.warps), 8 if rows <= 8 else ROWS
    _some_rows[(triton.cdiv(outputs, BLOCK_N),)](
        _descriptor(x, tile.warps, room), _descriptor(weight, tile.warps, BLOCK_N), bias, out, rows, outputs, steps,
        GATED=gated, BIAS=bias is not None, ROWS=room, STAGES=min(tile.stages, steps),
        num_warps=tile.warps, **chained(x.device),
    )  # fmt: skip
    return out


def _descriptor(matrix: Tensor, warps: int, rows: int) -> TensorDescriptor:
    """Describes copies of `rows` rows and 64 inputs for each warp; outside of the matrix they read zeros."""
    count, inputs = matrix.shape
    parts = matrix.as_strided((inputs // WIDTH, count, WIDTH), (WIDTH, matrix.stride(0), 1))
    kind = gl.NVMMASharedLayout(128, 16, 3)
    return TensorDescriptor(parts, list(parts.shape), list(parts.stride()), [warps, rows, WIDTH], kind)
