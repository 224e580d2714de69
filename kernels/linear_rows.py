"""Products of up to 8 rows with a weight, for Hopper, in Gluon; the plain twin: `linear_invariant._linear`.

Such a product is bound by reading the weight once. A program has 16 outputs, the side on which a matrix instruction has
16, so that even small weights make enough programs to keep the chip reading; its warps share the inputs, and programs
add nothing up between them. Each thread loads 16 bytes of a weight's row straight into the registers from which the
matrix unit multiplies them: which inputs those are does not matter, as long as both operands agree. No weight goes
through shared memory, and the first ones are on their way before the kernel before has ended. Knows no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .chain import await_previous, chained

#: Rows of a program: the columns of a matrix instruction; those that are not there are zeros, and not stored.
ROWS = 8
#: Outputs of a program: the rows of a matrix instruction.
BLOCK_N = 16


@dataclass(frozen=True)
class RowsTile:
    """Inputs that a warp multiplies in a step while the next ones are on their way; the warps of a program.

    `registers` are the most that a thread may have; with None the compiler decides, which may leave it too few.
    """

    step: int
    warps: int
    registers: int | None = None


#: What launches take: the best on an H200 of what was measured there.
TILE = RowsTile(128, 8)
#: Others worth a measurement: with a gate, two or more programs of these fit on a multiprocessor, not one.
CANDIDATES = (TILE, RowsTile(128, 4, 168), RowsTile(64, 8, 168), RowsTile(64, 4, 168))


@gluon.jit
def _weights(weight, output, lane, first, outputs, inputs, stride_weight):
    """A step of the weight [warps, outputs, STEP], from input `first` on; zeros beyond its ends."""
    mask = (output < outputs) & (first + lane < inputs)
    return gl.load(weight + output.to(gl.int64) * stride_weight + lane + first, mask=mask, other=0.0)


@gluon.jit
def _total(sums, bias, column, there, BIAS: gl.constexpr, dtype: gl.constexpr):
    """The sums of all warps and the bias, rounded: what a product alone would store."""
    total = gl.sum(sums, 0)
    if BIAS:
        total += gl.load(bias + column, mask=there, other=0.0).to(gl.float32)[:, None]
    return total.to(dtype)


@gluon.jit(do_not_specialize=["rows"])
def _some_rows(
    x, weight, bias, out, rows, outputs, inputs, stride_x, stride_weight,
    GATED: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STEP: gl.constexpr,
    CHAINED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    first_output = gl.program_id(0) * BLOCK_N
    part = gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None] * STEP
    lane = part + gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    output = (first_output + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, LEFT))))[None, :, None]
    ahead = _weights(weight, output, lane, 0, outputs, inputs, stride_weight)
    if GATED:
        second = weight + gl.to_tensor(outputs).to(gl.int64) * stride_weight  # of 1 Triton makes a constant
        ahead_up = _weights(second, output, lane, 0, outputs, inputs, stride_weight)
    part = gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None] * STEP
    depth = part + gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :]
    source = x + row * stride_x + depth
    sums = gl.zeros([num_warps, BLOCK_N, ROWS], gl.float32, SUMS)
    ups = sums
    await_previous(CHAINED)
    for first in range(0, inputs, STEP * num_warps):
        following = first + STEP * num_warps
        now = ahead
        ahead = _weights(weight, output, lane, following, outputs, inputs, stride_weight)
        values = gl.load(source + first, mask=(row < rows) & (first + depth < inputs), other=0.0)
        sums = mma_v2(now, values, sums)
        if GATED:
            now = ahead_up
            ahead_up = _weights(second, output, lane, following, outputs, inputs, stride_weight)
            ups = mma_v2(now, values, ups)
    column = first_output + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    there = column < outputs
    result = _total(sums, bias, column, there, BIAS, out.dtype.element_ty)
    if GATED:
        up = _total(ups, bias, outputs + column, there, BIAS, out.dtype.element_ty)
        gate = result.to(gl.float32)
        result = (gate / (1.0 + gl.exp(-gate)) * up.to(gl.float32)).to(out.dtype.element_ty)
    gl.store(out + row * outputs + column[:, None], result, mask=there[:, None] & (row < rows))


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: RowsTile = TILE, *, gated: bool = False
) -> Tensor:
    """x Wᵀ + b for x [up to 8 rows, inputs] and weight [outputs, inputs] of a 16-bit type; sums in float32.

    The inputs and the rows' strides are multiples of 16, and what is read begins at multiples of 16 bytes. With
    `gated`, the result is silu(a) · b of the halves a, b, each of them rounded as if the product alone had been stored.
    """
    rows, inputs = x.shape
    if rows > ROWS:
        raise ValueError(f"x has {rows} rows; the kernel serves up to {ROWS}")
    outputs = len(weight) // 2 if gated else len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _some_rows[(triton.cdiv(outputs, BLOCK_N),)](
        x, weight, bias, out, rows, outputs, inputs, x.stride(0), weight.stride(0),
        GATED=gated, BIAS=bias is not None, ROWS=ROWS, BLOCK_N=BLOCK_N, STEP=tile.step,
        num_warps=tile.warps, maxnreg=tile.registers, **chained(x.device),
    )  # fmt: skip
    return out
