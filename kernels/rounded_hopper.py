"""Products of up to 64 rows of 8-bit floats with weights of such codes, for Hopper, in Gluon.

Such a product should take as long as reading the codes. Outputs are the rows of a warpgroup's matrix instructions, the
rows of x their columns, and both operands come to shared memory by bulk copies, which a warp of its own begins: the
first codes while the kernel before this one ends. A program goes from tile to tile of outputs, and the copies of its
next steps are always on their way. Codes are as in `frame.kernels.quantized`; scales are of rows of x and of outputs.
Tiles whose steps several programs divide were slower, and so were copies begun by the warps that multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import quantized
from .barriers import barrier as real_barrier
from .chain import await_previous, chained
from .linear_invariant import num_multiprocessors
from .portable import INTERPRETED, gl, gluon

barrier = gl.barrier if INTERPRETED else real_barrier
_ASM = tl.constexpr(not INTERPRETED)
#: The most rows of x; a tile has as many as the next power of two, and no fewer than these.
MOST_ROWS, _LEAST_ROWS = 64, 16
#: Columns of x and of the codes are multiples of this.
ALIGNMENT = 128
#: Registers of a thread, of which those that multiply get some of the fetching warp's: the rounding kernel, which comes
#: next, has room beside a program.
_REGISTERS = 128


@dataclass(frozen=True)
class RoundedTile:
    """Outputs of a tile, columns of a step, and steps on their way."""

    block_n: int
    depth: int
    stages: int

    @property
    def warps(self) -> int:
        """Warps that multiply: one or two warpgroups."""
        return min(8, self.block_n // 16)


#: The quickest in nearly all of what `benchmarks/kernels/rounded_sweep.py` measured on an H200.
TILE = RoundedTile(64, 256, 6)


class Ring(NamedTuple):
    """Shared memory for the codes and the rows of steps, and barriers: a step has arrived, and its place is free."""

    codes: Any
    rows: Any
    ready: Any
    free: Any


@gluon.jit
def _fetch_codes(codes, ring, at, steps, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
                 STAGES: tl.constexpr):  # fmt: skip
    """Begins the copy of the codes of the program's step `at`; its barrier awaits them and the rows."""
    stage = at % STAGES
    mbarrier.expect(ring.ready.index(stage), (BLOCK_N + ROWS) * DEPTH)
    tile = gl.program_id(0) + at // steps * gl.num_programs(0)
    tma.async_copy_global_to_shared(
        codes, [tile * BLOCK_N, at % steps * DEPTH], ring.ready.index(stage), ring.codes.index(stage)
    )


@gluon.jit
def _fetch_rows(x, ring, at, steps, DEPTH: tl.constexpr, STAGES: tl.constexpr):
    """Begins the copy of the columns of x that the program's step `at` multiplies."""
    stage = at % STAGES
    tma.async_copy_global_to_shared(x, [0, at % steps * DEPTH], ring.ready.index(stage), ring.rows.index(stage))


@gluon.jit
def _fetch(x, codes, ring, steps, tiles, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
           STAGES: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """The fetching warp: as many steps as the ring holds, their codes early, then the others into what is free."""
    own = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * steps
    held = gl.minimum(own, STAGES)
    for at in range(held):
        _fetch_codes(codes, ring, at, steps, BLOCK_N, ROWS, DEPTH, STAGES)
    await_previous(CHAINED)
    for at in range(held):
        _fetch_rows(x, ring, at, steps, DEPTH, STAGES)
    for at in range(STAGES, own):
        mbarrier.wait(ring.free.index(at % STAGES), ((at // STAGES) & 1) ^ 1)
        _fetch_codes(codes, ring, at, steps, BLOCK_N, ROWS, DEPTH, STAGES)
        _fetch_rows(x, ring, at, steps, DEPTH, STAGES)


@gluon.jit
def _plain_step(x, codes, rows, outputs, depth, tile, step, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
                DEPTH: tl.constexpr):  # fmt: skip
    """The product of a step where kernels are interpreted."""
    output, row = tile * BLOCK_N + gl.arange(0, BLOCK_N), gl.arange(0, ROWS)
    column = step * DEPTH + gl.arange(0, DEPTH)
    inside = (column < depth)[None, :]
    w = gl.load(codes + output[:, None] * depth + column[None, :], mask=(output < outputs)[:, None] & inside, other=0.0)
    a = gl.load(x + row[:, None] * depth + column[None, :], mask=(row < rows)[:, None] & inside, other=0.0)
    return gl.dot(w.to(gl.float32), gl.trans(a.to(gl.float32)), input_precision="ieee")


@gluon.jit
def _multiply(
    x, x_scales, codes, scales, bias, out, rows, outputs, depth, steps, tiles, ring,
    BIAS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    SUMS: tl.constexpr, LINES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Multiplies the steps of the program's tiles, and stores their outputs."""
    await_previous(CHAINED)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    own = gl.load(x_scales + row, mask=row < rows, other=0.0)
    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    at = gl.program_id(0) * 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        output = tile * BLOCK_N + lane
        scale = gl.load(scales + output, mask=output < outputs, other=0.0)
        # the chip adds 8-bit floats up with fewer bits, so that the sums of a step are kept apart
        acc = gl.zeros([BLOCK_N, ROWS], gl.float32, SUMS)
        for step in range(steps):
            if _ASM:
                stage = at % STAGES
                mbarrier.wait(ring.ready.index(stage), (at // STAGES) & 1)
                empty = gl.zeros([BLOCK_N, ROWS], gl.float32, SUMS)
                part = warpgroup_mma(
                    ring.codes.index(stage), ring.rows.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True
                )
                part = warpgroup_mma_wait(0, deps=[part])
                barrier()  # all warps have multiplied what the next copies overwrite
                mbarrier.arrive(ring.free.index(stage), count=1)
            else:
                part = _plain_step(x, codes, rows, outputs, depth, tile, step, BLOCK_N, ROWS, DEPTH)
            acc += part
            at += 1
        result = acc * scale[:, None] * own[None, :]
        if BIAS:
            result += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)[:, None]
        result = gl.convert_layout(result.to(out.dtype.element_ty), LINES)
        column = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINES))
        line = gl.arange(0, ROWS, gl.SliceLayout(0, LINES))
        inside = (column < outputs)[:, None] & (line < rows)[None, :]
        gl.store(out + line[None, :] * outputs + column[:, None], result, mask=inside)


@gluon.jit(do_not_specialize=["rows", "depth", "steps", "tiles"])
def _rounded(
    x, x_scales, codes, scales, bias, out, rows, outputs, depth, steps, tiles,
    BIAS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    SUMS: tl.constexpr, LINES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if _ASM:
        KIND: tl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
        ring = Ring(
            gl.allocate_shared_memory(codes.dtype, [STAGES, BLOCK_N, DEPTH], KIND),
            gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], KIND),
            gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
            gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        )
        for slot in gl.static_range(STAGES):
            mbarrier.init(ring.ready.index(slot), count=1)
            mbarrier.init(ring.free.index(slot), count=1)
        fence_async_shared()
        gl.warp_specialize([
            (_multiply, (
                x, x_scales, codes, scales, bias, out, rows, outputs, depth, steps, tiles, ring, BIAS, BLOCK_N, ROWS,
                DEPTH, STAGES, SUMS, LINES, CHAINED,
            )),
            (_fetch, (x, codes, ring, steps, tiles, BLOCK_N, ROWS, DEPTH, STAGES, CHAINED)),
        ], [1], [40])  # fmt: skip
    else:
        _multiply(
            x, x_scales, codes, scales, bias, out, rows, outputs, depth, steps, tiles, Ring(x, x, x, x), BIAS, BLOCK_N,
            ROWS, DEPTH, STAGES, SUMS, LINES, CHAINED,
        )  # fmt: skip


def room_for(rows: int) -> int:
    """The rows of a tile for so many rows of x."""
    return max(_LEAST_ROWS, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=16)
def _layouts(block_n: int, warps: int, room: int) -> dict[str, object]:
    """How threads hold sums, and results that they store by 16 bytes."""
    across = min(32, block_n // 8)
    return {
        "SUMS": gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, room, 32]),
        "LINES": gl.BlockedLayout([8, 1], [across, 32 // across], [1, warps], [0, 1]),
    }


def fits(codes: Tensor, scales: Tensor, block: tuple[int, int], rows: int) -> bool:
    """Whether `product` takes the weight and so many rows: e4m3 with a scale for each output."""
    return (
        0 < rows <= MOST_ROWS
        and codes.dtype == torch.float8_e4m3fn
        and codes.is_contiguous()
        and codes.data_ptr() % 16 == 0
        and codes.shape[-1] % ALIGNMENT == 0
        and scales.is_contiguous()
        and scales.dtype == torch.float32
        and scales.shape[-1] == 1
        and block[0] == 1
    )


def product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, static: Tensor | None = None,
    tile: RoundedTile = TILE,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b for x [rows, K] of 16 bits, which is rounded to the codes' type, and codes [N, K] that `fits`.

    Two launches. Rows of x get scales of their own, unless `static` [1] is given.
    """
    found, own = quantized.round_rows(x, codes.dtype, x.shape[1], static, chains=True, room=room_for(len(x)))
    return rounded_product(found, own, codes, scales, bias, x.dtype, tile, padded=True)


def rounded_product(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    tile: RoundedTile = TILE, *, padded: bool = False,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b of `dtype` for up to 64 rows x [rows, K] of e4m3, as `quantized.round_rows` makes them; one launch.

    `x_scales` is float32 [rows, 1], and the weight one that `fits`. With `padded`, the memory of x is that of
    `room_for(rows)` rows, and copies read what is there: they are slower where they leave a matrix.
    """
    (rows, depth), outputs, room = x.shape, len(codes), room_for(len(x))
    tiles, steps = triton.cdiv(outputs, tile.block_n), triton.cdiv(depth, tile.depth)
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    source = x.as_strided((room, depth), (depth, 1)) if padded and not INTERPRETED else x
    _rounded[(min(tiles, num_multiprocessors(x.device)),)](
        _source(source, room, tile.depth), x_scales, _source(codes, tile.block_n, tile.depth), scales, bias, out, rows,
        outputs, depth, steps, tiles, BIAS=bias is not None, BLOCK_N=tile.block_n, ROWS=room, DEPTH=tile.depth,
        STAGES=tile.stages, num_warps=tile.warps, **_layouts(tile.block_n, tile.warps, room),
        **({} if INTERPRETED else {"maxnreg": _REGISTERS}), **chained(x.device),
    )  # fmt: skip
    return out


def _source(matrix: Tensor, rows: int, columns: int) -> Any:
    """Describes bulk copies of `rows` × `columns` codes; outside of the matrix they read zeros."""
    if INTERPRETED:
        return matrix
    return TensorDescriptor.from_tensor(matrix, [rows, columns], gl.NVMMASharedLayout(128, 8, 2))
