"""Products of many rows with a weight, for Hopper, in Gluon.

Each multiprocessor runs one program, which computes tiles of 128 rows one after another. One warp fetches steps of 64
elements of the depth by bulk copies; two warpgroups of 64 rows each add up the products of the steps, in order, in
float32. While they store a tile through shared memory, the fetching warp already fetches the next one. The result has
the bits of `linear_invariant._linear`: the same matrix instructions over the same steps, and the depth is not split.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .barriers import barrier
from .linear_invariant import num_multiprocessors

#: Rows of a tile, and of each of its two warpgroups.
BLOCK_M = 128
HALF_M = 64
#: The depth of a step: 128 bytes, the widest swizzle of a bulk copy.
BLOCK_K = 64
#: Outputs of a bulk copy to the result, for the same reason.
CHUNK = 64


@dataclass(frozen=True)
class HopperTile:
    """Outputs of a tile, steps in flight, buffers of 64 × 64 by which a warpgroup stores, row tiles of a group.

    The row tiles of a group are computed at about the same time, so that they read the same weights from the L2 cache.
    """

    block_n: int
    stages: int
    parts: int = 2
    group: int = 16

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, without barriers."""
        return 2 * (self.stages * (BLOCK_M + self.block_n) * BLOCK_K + 2 * self.parts * HALF_M * CHUNK)


#: Outputs of a tile -> the time that a tile takes, relative to the widest, measured on an H200 with 8,192 rows.
COSTS = {256: 1.0, 128: 0.535, 64: 0.45}
TILES = {256: HopperTile(256, 4), 128: HopperTile(128, 6), 64: HopperTile(64, 8)}
#: All tiles that the benchmark measures.
CANDIDATES = (
    HopperTile(256, 4, 2, 16), HopperTile(256, 4, 2, 8), HopperTile(256, 3, 4, 16), HopperTile(256, 3, 4, 8),
    HopperTile(128, 6, 2, 16), HopperTile(128, 5, 2, 16), HopperTile(64, 8, 1, 16), HopperTile(64, 6, 1, 16),
)  # fmt: skip


@lru_cache(maxsize=4096)
def tile_for(rows: int, outputs: int, programs: int, narrowest: int = 64) -> HopperTile:
    """The tile with which `programs` multiprocessors are expected to end first."""

    def cost(block_n: int) -> float:
        tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(outputs, block_n)
        return float(triton.cdiv(tiles, programs) * COSTS[block_n])

    return TILES[min((block_n for block_n in TILES if block_n >= narrowest), key=cost)]


class Ring(NamedTuple):
    """Shared memory for the rows and the weights of steps, and barriers: a step has arrived, and its place is free."""

    rows: Any
    weights: Any
    ready: Any
    free: Any


@gluon.jit
def place(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """(row, column) of the tile with number `tile`, counted in tiles."""
    group = tile // (GROUP * column_tiles)
    several = gl.minimum(row_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * column_tiles)
    return group * GROUP + within % several, within // several


@gluon.jit
def _fetch(
    x, weight, ring, row_tiles, column_tiles, steps, outputs,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The fetching warp: copies the steps of all tiles of the program, as far ahead as shared memory has room."""
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    COPIES: gl.constexpr = 2 if GATED else 1
    COPIED: gl.constexpr = BLOCK_N // COPIES
    x_tiles = ring.rows._reinterpret(ring.rows.dtype, [STAGES, 128, 64], KIND)
    weight_parts = ring.weights._reinterpret(ring.weights.dtype, [STAGES * COPIES, COPIED, 64], KIND)
    at = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        for step in range(steps):
            stage = at % STAGES
            ready = ring.ready.index(stage)
            mbarrier.wait(ring.free.index(stage), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, (128 + BLOCK_N) * 64 * 2)
            tma.async_copy_global_to_shared(x, [row * 128, step * 64], ready, x_tiles.index(stage))
            for copy in gl.static_range(COPIES):
                tma.async_copy_global_to_shared(
                    weight, [column * COPIED + copy * outputs, step * 64], ready,
                    weight_parts.index(stage * COPIES + copy),
                )  # fmt: skip
            at += 1


@gluon.jit
def add_steps(
    x_tiles, weight_tiles, ready, free, at, steps, HALF: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    FENCED: gl.constexpr = False,
):  # fmt: skip
    """(sums of a warpgroup's 64 rows over `steps` steps from number `at` on, the number of the step after them).

    FENCED: some operands were written to shared memory by threads, not by bulk copies.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    acc = gl.zeros([64, BLOCK_N], gl.float32, SUMS)
    for step in range(steps):
        stage = at % STAGES
        mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
        if FENCED:
            fence_async_shared()
        sums = warpgroup_mma(
            x_tiles.index(stage * 2 + HALF), weight_tiles.index(stage).permute((1, 0)), acc, is_async=True
        )
        acc = warpgroup_mma_wait(1, deps=[sums])
        # the matrix instruction of the step before has ended
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=step > 0)
        at += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1)
    return acc, at


@gluon.jit
def _silu_mul(gate, up, dtype: gl.constexpr):
    """silu(gate) · up, rounded as `activation.silu_mul` of a product of this type."""
    wide = gate.to(dtype).to(gl.float32)
    small = gl.exp(-gl.abs(wide))
    logistic = gl.where(wide >= 0, 1.0, small) / (1.0 + small)
    return (wide * logistic).to(dtype) * up.to(dtype)


@gluon.jit
def halves(sums, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The left and the right half of the columns, each in the register layout of a product of that width."""
    HALF: gl.constexpr = COLUMNS // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    left, right = sums.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def add_bias(sums, bias, first, outputs):
    """sums + bias[column] for the columns from `first` on that are below `outputs`."""
    column = first + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    return sums + gl.load(bias + column, mask=column < outputs, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _store_part(values, out, smem, row, column, part: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr):
    """Stores 64 × 64 of the result by way of one of the warpgroup's PARTS buffers in shared memory.

    The buffers take turns; PARTS divides the number of stores of a tile, so that the turns go on over tiles.
    """
    place = smem.index(HALF * PARTS + part % PARTS)
    tma.store_wait(PARTS - 1)
    barrier()
    place.store(values.to(out.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(out, [row, column + part * 64], place)


@gluon.jit
def store(
    values, out, smem, row, column,
    first: gl.constexpr, COLUMNS: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Stores COLUMNS columns of the tile's result, from its 64-column part `first` on."""
    if COLUMNS == 64:
        _store_part(values, out, smem, row, column, first, HALF, PARTS)
    else:
        left, right = halves(values, 64, COLUMNS)
        store(left, out, smem, row, column, first, COLUMNS // 2, HALF, PARTS)
        store(right, out, smem, row, column, first + COLUMNS // 128, COLUMNS // 2, HALF, PARTS)


@gluon.jit
def _multiply(
    out, bias, ring, out_smem, row_tiles, column_tiles, steps, outputs,
    HALF: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: computes and stores 64 rows of each tile of the program."""
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    x_tiles = ring.rows._reinterpret(ring.rows.dtype, [STAGES * 2, 64, 64], KIND)
    weight_tiles = ring.weights._reinterpret(ring.weights.dtype, [STAGES, BLOCK_N, 64], KIND)
    at = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        acc, at = add_steps(x_tiles, weight_tiles, ring.ready, ring.free, at, steps, HALF, BLOCK_N, STAGES)
        first = column * WIDTH
        if GATED:
            gate, up = halves(acc, 64, BLOCK_N)
            if BIAS:
                gate = add_bias(gate, bias, first, outputs)
                up = add_bias(up, bias + outputs, first, outputs)
            values = _silu_mul(gate, up, out.dtype)
        else:
            values = acc
            if BIAS:
                values = add_bias(values, bias, first, outputs)
        store(values, out, out_smem, row * 128 + HALF * 64, first, 0, WIDTH, HALF, PARTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["row_tiles", "column_tiles", "steps", "outputs"])
def _product(
    x, weight, bias, out, row_tiles, column_tiles, steps, outputs,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_smem = gl.allocate_shared_memory(x.dtype, [STAGES * 2, 64, 64], KIND)
    weight_smem = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_N, 64], KIND)
    out_smem = gl.allocate_shared_memory(x.dtype, [2 * PARTS, 64, 64], KIND)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    ring = Ring(x_smem, weight_smem, ready, free)
    gl.warp_specialize([
        (_multiply, (
            out, bias, ring, out_smem, row_tiles, column_tiles, steps, outputs,
            0, BLOCK_N, STAGES, PARTS, GROUP, BIAS, GATED,
        )),
        (_multiply, (
            out, bias, ring, out_smem, row_tiles, column_tiles, steps, outputs,
            1, BLOCK_N, STAGES, PARTS, GROUP, BIAS, GATED,
        )),
        (_fetch, (
            x, weight, ring, row_tiles, column_tiles, steps, outputs, BLOCK_N, STAGES, GROUP, GATED,
        )),
    ], [4, 1], [232, 40])  # fmt: skip


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: HopperTile | None = None, *, gated: bool = False
) -> Tensor:
    """x Wᵀ + b for x [rows, depth] and weight [outputs, depth] of a 16-bit type, on Hopper.

    Rows of x, of the weight and of the result begin at multiples of 16 bytes. With `gated`, the result is silu(a) · b
    of the halves a, b, each of them rounded as if the product alone had been stored. `tile` changes no bit.
    """
    rows, depth = x.shape
    programs = num_multiprocessors(x.device)
    tile = tile or tile_for(rows, len(weight), programs, 128 if gated else 64)
    outputs, width = (len(weight) // 2, tile.block_n // 2) if gated else (len(weight), tile.block_n)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = triton.cdiv(rows, BLOCK_M), triton.cdiv(outputs, width)
    _product[(min(row_tiles * column_tiles, programs),)](
        descriptor(x, BLOCK_M, BLOCK_K), descriptor(weight, width, BLOCK_K), out if bias is None else bias,
        descriptor(out, HALF_M, CHUNK), row_tiles, column_tiles, triton.cdiv(depth, BLOCK_K), outputs,
        BLOCK_N=tile.block_n, STAGES=tile.stages, PARTS=min(tile.parts, width // CHUNK), GROUP=tile.group,
        BIAS=bias is not None, GATED=gated, num_warps=4,
    )  # fmt: skip
    return out


def descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describes bulk copies of `rows` × `columns`; outside of the matrix they read zeros and write nothing."""
    kind = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns], kind)
