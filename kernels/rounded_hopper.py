"""Products of up to 128 rows of 8-bit floats with weights of such codes, for Hopper, in Gluon.

Such a product should take as long as reading the codes. Outputs are the rows of a warpgroup's matrix instructions, the
rows of x their columns, and both operands come to shared memory by bulk copies. A program has a multiprocessor to
itself and an equal share of the steps of all tiles, one after another: the copies of its next steps are always on their
way, the first codes of them while the kernel before this one ends. Where shares end within a tile, the sums of its
parts are kept in float32, and the last program to end adds them up, always in the same order. Codes are as in
`frame.kernels.quantized`; scales are of rows of x and of outputs.
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
from .coded_rows import arrivals
from .linear_invariant import num_multiprocessors
from .portable import INTERPRETED, gl, gluon

barrier = gl.barrier if INTERPRETED else real_barrier
_ASM = tl.constexpr(not INTERPRETED)
#: The most rows of x; a tile has as many as the next power of two, and no fewer than these.
MOST_ROWS, _LEAST_ROWS = 128, 16
#: Columns of x and of the codes are multiples of this.
ALIGNMENT = 128
#: The most programs that divide a tile.
_MOST_PARTS = 8


@dataclass(frozen=True)
class RoundedTile:
    """Outputs of a tile, columns of a step, steps on their way, and how programs divide the steps.

    With `parts` 0 all programs have the same number of steps, wherever tiles end; else a tile is that of so many. With
    `apart`, a warp of its own begins copies, not those that multiply. `registers` are the most of a thread (0: any),
    of which those that multiply get some of the others': where programs leave some, the next kernel's come in beside
    them, and with half of the registers and of the shared memory the next product's.
    """

    block_n: int
    depth: int
    stages: int
    parts: int = 0
    apart: bool = False
    registers: int = 0

    @property
    def warps(self) -> int:
        """Warps that multiply: one or two warpgroups."""
        return min(8, self.block_n // 16)

    def shared_bytes(self, rows: int) -> int:
        """Shared memory of a program: its ring, its barriers, and results on their way to another register layout."""
        room = room_for(rows)
        return self.stages * ((self.block_n + room) * self.depth + 16) + self.warps * 1024


#: What launches take, by rows of a tile, until it is measured.
TILES = {
    16: RoundedTile(128, 128, 9, 0, True, 128),
    32: RoundedTile(128, 128, 9, 0, True, 128),
    64: RoundedTile(128, 128, 8, 0, True, 128),
    128: RoundedTile(128, 128, 6),
}
#: Tiles that the benchmark measures, for rows whose ring a multiprocessor holds and whose sums registers hold.
CANDIDATES = (
    RoundedTile(128, 128, 8, 0, True, 128), RoundedTile(128, 128, 8, 1, True, 128),
    RoundedTile(128, 128, 8, 2, True, 128), RoundedTile(128, 128, 8, 4, True, 128), RoundedTile(128, 128, 8, 0, True),
    RoundedTile(128, 256, 4, 0, True, 128), RoundedTile(256, 128, 5, 0, True), RoundedTile(256, 128, 5, 1, True, 128),
    RoundedTile(64, 128, 12, 0, True, 128), RoundedTile(64, 128, 12, 2, True, 128),
    RoundedTile(64, 256, 6, 1, True, 128), RoundedTile(64, 128, 6, 0, True, 128), RoundedTile(64, 128, 6, 2, True, 128),
    RoundedTile(128, 128, 8), RoundedTile(128, 128, 6), RoundedTile(128, 128, 6, 1), RoundedTile(128, 128, 6, 4),
    RoundedTile(128, 128, 6, 0, True), RoundedTile(128, 128, 6, 4, True), RoundedTile(256, 128, 5, 1),
    RoundedTile(64, 128, 12), RoundedTile(128, 128, 4, 0, False, 128), RoundedTile(128, 128, 4, 1, False, 128),
    RoundedTile(64, 128, 6), RoundedTile(64, 128, 6, 1), RoundedTile(64, 128, 6, 2),
)  # fmt: skip


class Ring(NamedTuple):
    """Shared memory for the codes and the rows of steps, and barriers: a step has arrived, and its place is free."""

    codes: Any
    rows: Any
    ready: Any
    free: Any


@gluon.jit
def _fetch_codes(codes, ring, at, unit, steps, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
                 STAGES: tl.constexpr):  # fmt: skip
    """Begins the copy of the codes of the program's step `at`; its barrier awaits them and the rows."""
    stage = at % STAGES
    mbarrier.expect(ring.ready.index(stage), (BLOCK_N + ROWS) * DEPTH)
    place = unit + at
    tma.async_copy_global_to_shared(
        codes, [place // steps * BLOCK_N, place % steps * DEPTH], ring.ready.index(stage), ring.codes.index(stage)
    )


@gluon.jit
def _fetch_rows(x, ring, at, unit, steps, DEPTH: tl.constexpr, STAGES: tl.constexpr):
    """Begins the copy of the columns of x that the program's step `at` multiplies."""
    stage = at % STAGES
    tma.async_copy_global_to_shared(
        x, [0, (unit + at) % steps * DEPTH], ring.ready.index(stage), ring.rows.index(stage)
    )


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
def _joined(sums, place, tile, first, final, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
            SUMS: tl.constexpr):  # fmt: skip
    """The sum of a tile's parts, of programs `first` to `final`, in this order; all are loaded at once if few."""
    total = gl.zeros([BLOCK_N, ROWS], gl.float32, SUMS)
    if BLOCK_N * ROWS <= 8192:
        for part in gl.static_range(PARTS):
            there = (place >= 0) & (first + part <= final)
            source = sums + (tile + first + part) * (BLOCK_N * ROWS) + place
            total += gl.load(source, mask=there, other=0.0, cache_modifier=".cg")
    else:
        for other in range(first, final + 1):
            total += gl.load(sums + (tile + other) * (BLOCK_N * ROWS) + place, cache_modifier=".cg")
    return total


@gluon.jit
def _multiply(
    x, x_scales, codes, scales, bias, out, sums, arrived, rows, outputs, depth, steps, share, unit, count, ring,
    BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, APART: tl.constexpr, SUMS: tl.constexpr, LINES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Multiplies the program's steps, from number `unit` of all on, and stores the tiles that end here."""
    if APART:
        await_previous(CHAINED)
    program = gl.program_id(0)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    own = gl.load(x_scales + row, mask=row < rows, other=0.0)
    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    place = lane[:, None] * ROWS + row[None, :]
    at = program * 0
    for tile in range(unit // steps, (unit + count - 1) // steps + 1):
        output = tile * BLOCK_N + lane
        scale = gl.load(scales + output, mask=output < outputs, other=0.0)
        # the chip adds 8-bit floats up with fewer bits, so that the sums of a step are kept apart
        acc = gl.zeros([BLOCK_N, ROWS], gl.float32, SUMS)
        begin = gl.maximum(unit - tile * steps, 0)
        end = gl.minimum(unit + count - tile * steps, steps)
        for step in range(begin, end):
            if _ASM:
                stage = at % STAGES
                mbarrier.wait(ring.ready.index(stage), (at // STAGES) & 1)
                empty = gl.zeros([BLOCK_N, ROWS], gl.float32, SUMS)
                part = warpgroup_mma(
                    ring.codes.index(stage), ring.rows.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True
                )
                part = warpgroup_mma_wait(0, deps=[part])
                barrier()  # all warps have multiplied what the next copies overwrite
                if APART:
                    mbarrier.arrive(ring.free.index(stage), count=1)
                else:
                    following = at + STAGES
                    if following < count:
                        _fetch_codes(codes, ring, following, unit, steps, BLOCK_N, ROWS, DEPTH, STAGES)
                        _fetch_rows(x, ring, following, unit, steps, DEPTH, STAGES)
            else:
                part = _plain_step(x, codes, rows, outputs, depth, tile, step, BLOCK_N, ROWS, DEPTH)
            acc += part
            at += 1
        # the programs that have steps of this tile
        first, final = tile * steps // share, (tile * steps + steps - 1) // share
        ends = final >= first
        if PARTS > 1:
            if final > first:
                gl.store(sums + (tile + program) * (BLOCK_N * ROWS) + place, acc)
                barrier()
                ends = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == final - first
                if ends:
                    acc = _joined(sums, place, tile, first, final, PARTS, BLOCK_N, ROWS, SUMS)
                    gl.store(arrived + tile, 0)
        if ends:
            result = acc * scale[:, None] * own[None, :]
            if BIAS:
                result += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)[:, None]
            result = gl.convert_layout(result.to(out.dtype.element_ty), LINES)
            column = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINES))
            line = gl.arange(0, ROWS, gl.SliceLayout(0, LINES))
            inside = (column < outputs)[:, None] & (line < rows)[None, :]
            gl.store(out + line[None, :] * outputs + column[:, None], result, mask=inside)


@gluon.jit
def _fetch(x, codes, ring, unit, count, steps, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
           STAGES: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """The fetching warp: as many steps as the ring holds, their codes early, then the others into what is free."""
    held = gl.minimum(count, STAGES)
    for at in range(held):
        _fetch_codes(codes, ring, at, unit, steps, BLOCK_N, ROWS, DEPTH, STAGES)
    await_previous(CHAINED)
    for at in range(held):
        _fetch_rows(x, ring, at, unit, steps, DEPTH, STAGES)
    for at in range(STAGES, count):
        mbarrier.wait(ring.free.index(at % STAGES), ((at // STAGES) & 1) ^ 1)
        _fetch_codes(codes, ring, at, unit, steps, BLOCK_N, ROWS, DEPTH, STAGES)
        _fetch_rows(x, ring, at, unit, steps, DEPTH, STAGES)


@gluon.jit(do_not_specialize=["rows", "depth", "steps", "share", "units"])
def _rounded(
    x, x_scales, codes, scales, bias, out, sums, arrived, rows, outputs, depth, steps, share, units,
    BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, APART: tl.constexpr, SUMS: tl.constexpr, LINES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    unit = gl.program_id(0) * share  # the first of the program's steps among those of all tiles
    count = gl.minimum(share, units - unit)
    ring = Ring(x, x, x, x)
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
    if APART:
        gl.warp_specialize([
            (_multiply, (
                x, x_scales, codes, scales, bias, out, sums, arrived, rows, outputs, depth, steps, share, unit, count,
                ring, BIAS, PARTS, BLOCK_N, ROWS, DEPTH, STAGES, APART, SUMS, LINES, CHAINED,
            )),
            (_fetch, (x, codes, ring, unit, count, steps, BLOCK_N, ROWS, DEPTH, STAGES, CHAINED)),
        ], [1], [40])  # fmt: skip
    else:
        if _ASM:
            for slot in gl.static_range(STAGES):
                if slot < count:
                    _fetch_codes(codes, ring, slot, unit, steps, BLOCK_N, ROWS, DEPTH, STAGES)
        await_previous(CHAINED)
        if _ASM:
            for slot in gl.static_range(STAGES):
                if slot < count:
                    _fetch_rows(x, ring, slot, unit, steps, DEPTH, STAGES)
        _multiply(
            x, x_scales, codes, scales, bias, out, sums, arrived, rows, outputs, depth, steps, share, unit, count,
            ring, BIAS, PARTS, BLOCK_N, ROWS, DEPTH, STAGES, APART, SUMS, LINES, CHAINED,
        )  # fmt: skip


def room_for(rows: int) -> int:
    """The rows of a tile for so many rows of x."""
    return max(_LEAST_ROWS, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=4096)
def division(tiles: int, steps: int, programs: int, parts: int) -> tuple[int, int]:
    """(steps of a program, the most programs that have steps of one tile) for `tiles` tiles of `steps` steps."""
    if parts:
        share = triton.cdiv(steps, parts) * triton.cdiv(tiles * parts, programs)
    else:
        share = triton.cdiv(tiles * steps, programs)
    share = max(share, triton.cdiv(steps, _MOST_PARTS - 1))
    first = range(0, tiles * steps, steps)
    return share, max((unit + steps - 1) // share - unit // share + 1 for unit in first)


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
    tile: RoundedTile | None = None,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b for x [rows, K] of 16 bits, which is rounded to the codes' type, and codes [N, K] that `fits`.

    Two launches. Rows of x get scales of their own, unless `static` [1] is given.
    """
    found, own = quantized.round_rows(x, codes.dtype, x.shape[1], static, chains=True, room=room_for(len(x)))
    return rounded_product(found, own, codes, scales, bias, x.dtype, tile, padded=True)


def rounded_product(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    tile: RoundedTile | None = None, *, padded: bool = False,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b of `dtype` for up to 128 rows x [rows, K] of e4m3, as `quantized.round_rows` makes them; one launch.

    `x_scales` is float32 [rows, 1], and the weight one that `fits`. With `padded`, the memory of x is that of
    `room_for(rows)` rows, and copies read what is there: they are slower where they leave a matrix.
    """
    (rows, depth), outputs, room = x.shape, len(codes), room_for(len(x))
    tile = tile or TILES[room]
    tiles, steps = triton.cdiv(outputs, tile.block_n), triton.cdiv(depth, tile.depth)
    share, parts = division(tiles, steps, num_multiprocessors(x.device), tile.parts)
    programs = triton.cdiv(tiles * steps, share)
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    source = x.as_strided((room, depth), (depth, 1)) if padded and not INTERPRETED else x
    sums = out
    if parts > 1:
        sums = torch.empty((tiles + programs, tile.block_n, room), dtype=torch.float32, device=x.device)
    _rounded[(programs,)](
        _source(source, room, tile.depth), x_scales, _source(codes, tile.block_n, tile.depth), scales, bias, out, sums,
        arrivals(x.device, tiles), rows, outputs, depth, steps, share, tiles * steps,
        BIAS=bias is not None, PARTS=parts, BLOCK_N=tile.block_n, ROWS=room, DEPTH=tile.depth, STAGES=tile.stages,
        APART=tile.apart and not INTERPRETED, num_warps=tile.warps, **_layouts(tile.block_n, tile.warps, room),
        **({"maxnreg": tile.registers} if tile.registers and not INTERPRETED else {}), **chained(x.device),
    )  # fmt: skip
    return out


def _source(matrix: Tensor, rows: int, columns: int) -> Any:
    """Describes bulk copies of `rows` × `columns` codes; outside of the matrix they read zeros."""
    if INTERPRETED:
        return matrix
    return TensorDescriptor.from_tensor(matrix, [rows, columns], gl.NVMMASharedLayout(128, 8, 2))
