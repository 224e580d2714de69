"""Products of up to 64 rows of bfloat16 with nibbles by matrix instructions for 8-bit floats, for Hopper, in Gluon.

A byte whose value is a nibble is that number of 2⁻⁹ as a float of 8 bits (e4m3), so that a weight costs three eighths
of an instruction to decode: shifts and masks of words. Rows come in two halves (`frame.kernels.halves`), which have
twice the columns at twice the rate. The chip adds up 8-bit floats with some 14 bits: sums of 128 columns, which have
one scale, are kept apart, and low halves come first, so that they are exact among themselves. What the zeros of a group
take away is the sum of the row's columns there times zero and scale.

Weights are the left operand, in registers, the halves come from shared memory. A warp fetches both by bulk copies, the
first codes while the kernel before ends, and two warpgroups multiply, each by outputs of its own: one decodes while
the products of the other run. A program computes an equal share of the steps of all tiles, or whole tiles; where
several share a tile, the last of them to end adds the sums up, always in the same order. Codes are as in
`frame.kernels.quantized`.
"""

from __future__ import annotations

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

from .barriers import barrier as real_barrier
from .chain import await_previous, chained
from .coded_fragments import _nothing, _with
from .coded_rows import arrivals
from .halves import CHUNK, UNIT, split_rows, width_of
from .linear_invariant import num_multiprocessors
from .nibble_tiles import WARPGROUPS, NibbleTile, tile_for
from .portable import INTERPRETED, gl, gluon

barrier = gl.barrier if INTERPRETED else real_barrier
_ASM = tl.constexpr(not INTERPRETED)
#: By the matrix instructions of a warpgroup side by side: the registers of all threads of a program at first, and of
#: those that multiply later, which get what the fetching warp leaves.
_REGISTERS = {1: (144, 192), 2: (168, 232)}
_FETCHING_REGISTERS = 40
#: Four bytes to those of their lower and upper four bits.
_NIBBLES = tl.constexpr("""{
.reg .b32 up;
shr.u32 up, $2, 4;
and.b32 $0, $2, 0x0F0F0F0F;
and.b32 $1, up, 0x0F0F0F0F;
}""")


class Ring(NamedTuple):
    """Shared memory for the codes and the halves of steps, and barriers: a step has arrived, and its place is free."""

    codes: Any
    rows: Any
    ready: Any
    free: Any


class Share(NamedTuple):
    """The steps from `begin` to below `end` of all steps of all tiles; the steps of a tile, and of a program."""

    begin: Any
    end: Any
    steps: Any
    each: Any


class Given(NamedTuple):
    """What a product is of, and where it goes: sums of shared tiles first, whose arrivals are counted.

    The halves and the codes are here for the interpreter, which knows no copies; `units` are sums of columns of a row.
    """

    halves: Any
    codes: Any
    x_sums: Any
    factors: Any
    scales: Any
    zeros: Any
    bias: Any
    out: Any
    sums: Any
    arrived: Any
    rows: Any
    outputs: Any
    groups: Any
    units: Any


@gluon.jit
def _next(tile, column, steps):
    """The step behind one, which may be the first of the next tile."""
    ends = column + 1 == steps
    return gl.where(ends, tile + 1, tile), gl.where(ends, 0, column + 1)


@gluon.jit
def _begin_codes(source, ring, tile, column, slot, CHUNKS: tl.constexpr, STAGES: tl.constexpr):
    """Begins the copy of the codes of a step; its barrier awaits them and the halves."""
    ready = ring.ready.index(slot)
    BLOCK_N: tl.constexpr = ring.codes.shape[1]
    ROW_BYTES: tl.constexpr = ring.rows.shape[0] // STAGES * ring.rows.shape[1] * ring.rows.shape[2]
    mbarrier.expect(ready, CHUNKS * BLOCK_N * 64 + ROW_BYTES)
    for chunk in gl.static_range(CHUNKS):
        place = ring.codes.index(slot * CHUNKS + chunk)
        tma.async_copy_global_to_shared(source, [tile * BLOCK_N, (column * CHUNKS + chunk) * 64], ready, place)


@gluon.jit
def _begin_rows(source, ring, column, slot, UNITS: tl.constexpr):
    """Begins the copy of the columns of the halves that a step multiplies."""
    ready = ring.ready.index(slot)
    for unit in gl.static_range(UNITS):
        first = (column * UNITS + unit) * ring.rows.shape[2]
        tma.async_copy_global_to_shared(source, [0, first], ready, ring.rows.index(slot * UNITS + unit))


@gluon.jit
def _fetch(halves, codes, ring, share, CHUNKS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
           CHAINED: tl.constexpr):  # fmt: skip
    """The fetching warp: as many steps as the ring holds, their codes early, then the others into what is free."""
    own = share.end - share.begin
    held = gl.minimum(own, STAGES)
    first, column = share.begin // share.steps, share.begin % share.steps
    tile, early = first, column
    for at in range(held):
        _begin_codes(codes, ring, tile, early, at, CHUNKS, STAGES)
        tile, early = _next(tile, early, share.steps)
    await_previous(CHAINED)
    tile = first
    for at in range(held):
        _begin_rows(halves, ring, column, at, UNITS)
        tile, column = _next(tile, column, share.steps)
    for at in range(STAGES, own):
        slot = at % STAGES
        mbarrier.wait(ring.free.index(slot), ((at // STAGES) & 1) ^ 1)
        _begin_codes(codes, ring, tile, column, slot, CHUNKS, STAGES)
        _begin_rows(halves, ring, column, slot, UNITS)
        tile, column = _next(tile, column, share.steps)


@gluon.jit
def _numbers(codes):
    """The numbers of the lower, and of the upper four bits of bytes."""
    if _ASM:
        low, high = gl.inline_asm_elementwise(
            _NIBBLES, "=r,=r,r", [codes], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
        )
        low, high = low.to(gl.float8e4nv, bitcast=True), high.to(gl.float8e4nv, bitcast=True)
    else:
        low, high = (codes & 15).to(gl.float32) * UNIT, (codes >> 4).to(gl.float32) * UNIT
    return low, high


@gluon.jit
def _pieces(values, COUNT: tl.constexpr):
    """[64, 64] as 1, 2 or 4 tensors of fewer columns."""
    found = _with(_nothing(), values)
    if COUNT == 2:
        found = gl.split(gl.permute(gl.reshape(values, (64, 2, 32)), (0, 2, 1)))
    elif COUNT == 4:
        first, second = gl.split(gl.permute(gl.reshape(values, (64, 2, 2, 16)), (0, 3, 2, 1)))
        found = gl.split(first) + gl.split(second)
    return found


@gluon.jit
def _left(low, high, WIDTH: tl.constexpr, SUMS: tl.constexpr):
    """The left operand [64, WIDTH] of the two numbers of bytes, in the order of `_split_rows`."""
    both = gl.permute(gl.join(low, high), (0, 2, 1))
    both = gl.permute(gl.reshape(both, (64, 2, 4, WIDTH // 32, 4)), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(both, (64, WIDTH)), gl.DotOperandLayout(0, SUMS, 4), assert_trivial=True)


@gluon.jit
def _lefts(codes, COUNT: tl.constexpr, SUMS: tl.constexpr):
    """The left operands of the bytes [64, 64] of a chunk."""
    low, high = _numbers(codes)
    lows, highs = _pieces(low, COUNT), _pieces(high, COUNT)
    found = _nothing()
    for piece in gl.static_range(COUNT):
        found = _with(found, _left(lows[piece], highs[piece], 128 // COUNT, SUMS))
    return found


@gluon.jit
def _plain_codes(given, output, chunk, depth):
    """Bytes [64, 64] of a chunk where kernels are interpreted."""
    byte = chunk * 64 + gl.arange(0, 64)
    inside = (output < given.outputs)[:, None] & (byte < depth // 2)[None, :]
    return gl.load(given.codes + output[:, None] * (depth // 2) + byte[None, :], mask=inside, other=0)


@gluon.jit
def _plain_part(given, left, unit, depth, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The product of a unit where kernels are interpreted."""
    column = unit * WIDTH + gl.arange(0, WIDTH)
    at = given.halves + gl.arange(0, ROWS)[:, None] * depth + column[None, :]
    inside = (column < depth)[None, :]
    x = gl.load(at, mask=inside, other=0.0).to(gl.float32)
    x += gl.load(at + ROWS * depth, mask=inside, other=0.0).to(gl.float32)
    return gl.dot(left, gl.trans(x), input_precision="ieee")


@gluon.jit
def _scales_of(given, tile, column, FIRST: tl.constexpr, OWN: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
               WIDTH: tl.constexpr, ZEROS: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """(scales, zeros) of the outputs of each product of a step; where there are no zeros, the scales again."""
    COUNT: tl.constexpr = 128 // WIDTH
    found = _nothing()
    for at in gl.static_range(CHUNKS * OWN * COUNT):
        unit = (column * CHUNKS + at // (OWN * COUNT)) * COUNT + at % COUNT
        output = (tile * (2 * OWN) + FIRST + at // COUNT % OWN) * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        place = gl.minimum(output, given.outputs - 1) * given.groups
        if GROUP:
            place += gl.minimum(unit * WIDTH // GROUP, given.groups - 1)
        scale = gl.load(given.scales + place)
        zero = scale
        if ZEROS:
            zero = gl.load(given.zeros + place)
        found = _with(found, (scale, zero))
    return found


@gluon.jit
def _decoded(given, ring, tile, column, slot, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PART: tl.constexpr,
             OWN: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """The left operands of a chunk of a step and 64 outputs."""
    if _ASM:
        codes = ring.codes.index(slot * CHUNKS + CHUNK).slice(PART * 64, 64).load(WORDS)
    else:
        output = (tile * (2 * OWN) + PART) * 64 + gl.arange(0, 64)
        codes = _plain_codes(given, output, column * CHUNKS + CHUNK, given.units * WIDTH)
    return _lefts(codes, 128 // WIDTH, SUMS)


@gluon.jit
def _begun(given, ring, left, column, slot, UNIT: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
           WIDTH: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """The product of 64 outputs and a unit of a step, which has only begun: of the low halves, then of the high."""
    if _ASM:
        halves = ring.rows.index(slot * UNITS + UNIT)
        low, high = halves.slice(0, ROWS).permute((1, 0)), halves.slice(ROWS, ROWS).permute((1, 0))
        empty = gl.zeros([64, ROWS], gl.float32, SUMS)
        part = warpgroup_mma(left, low, empty, use_acc=False, is_async=True)
        part = warpgroup_mma(left, high, part, is_async=True)
    else:
        part = _plain_part(given, left, column * UNITS + UNIT, given.units * WIDTH, ROWS, WIDTH)
    return part


@gluon.jit
def _replaced(values, value, AT: tl.constexpr, COUNT: tl.constexpr):
    """COUNT values, with another one at AT."""
    found = _nothing()
    for place in gl.static_range(COUNT):
        if place == AT:
            found = _with(found, value)
        else:
            found = _with(found, values[place])
    return found


@gluon.jit
def _x_sums(given, column, first, ROWS: tl.constexpr, UNITS: tl.constexpr, COUNT: tl.constexpr, SUMS: tl.constexpr):
    """The sums of x of COUNT units of a step, from one on."""
    found = _nothing()
    for unit in gl.static_range(COUNT):
        place = (column * UNITS + first + unit) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
        found = _with(found, gl.load(given.x_sums + place))
    return found


@gluon.jit
def _added(acc, part, factors, x_sum, LATER: tl.constexpr, AT: tl.constexpr, OWN: tl.constexpr, ZEROS: tl.constexpr):
    """The sums, with a product times its scales once it has ended, while LATER ones run."""
    if _ASM:
        part = warpgroup_mma_wait(2 * LATER, deps=[part])
    scale, zero = factors
    scale = scale.to(gl.float32)
    if ZEROS:
        taken = scale * zero.to(gl.float32)
    else:
        taken = scale * 8
    return _replaced(acc, acc[AT] + part * scale[:, None] - taken[:, None] * x_sum[None, :], AT, OWN)


@gluon.jit
def _add_step(
    acc, scales, given, ring, tile, column, at, FIRST: tl.constexpr, OWN: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ZEROS: tl.constexpr, WORDS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """The sums and the products of the program's step `at`: the next codes are decoded while a product runs."""
    COUNT: tl.constexpr = 128 // WIDTH
    UNITS: tl.constexpr = CHUNKS * COUNT
    LAST: tl.constexpr = UNITS * OWN
    slot = at % STAGES
    x_sums = _x_sums(given, column, 0, ROWS, UNITS, UNITS if COUNT == 1 else 1, SUMS)
    if _ASM:
        mbarrier.wait(ring.ready.index(slot), (at // STAGES) & 1)
    lefts = _decoded(given, ring, tile, column, slot, 0, CHUNKS, FIRST, OWN, WIDTH, WORDS, SUMS)
    last = _begun(given, ring, lefts[0], column, slot, 0, UNITS, ROWS, WIDTH, SUMS)
    for next in gl.static_range(1, LAST + 1):
        begun = last
        if next < LAST:
            if next % COUNT == 0:
                lefts = _decoded(
                    given, ring, tile, column, slot, next // (OWN * COUNT), CHUNKS, FIRST + next // COUNT % OWN, OWN,
                    WIDTH, WORDS, SUMS,
                )  # fmt: skip
            begun = _begun(
                given, ring, lefts[next % COUNT], column, slot, next // (OWN * COUNT) * COUNT + next % COUNT, UNITS,
                ROWS, WIDTH, SUMS,
            )  # fmt: skip
        if COUNT == 1:
            x_sum = x_sums[(next - 1) // OWN]
        else:  # registers hold few of them
            unit = (next - 1) // (OWN * COUNT) * COUNT + (next - 1) % COUNT
            x_sum = _x_sums(given, column, unit, ROWS, UNITS, 1, SUMS)[0]
        acc = _added(acc, last, scales[next - 1], x_sum, next < LAST, (next - 1) // COUNT % OWN, OWN, ZEROS)
        last = begun
    if _ASM:
        barrier()  # all warps have multiplied what the next copies overwrite
        mbarrier.arrive(ring.free.index(slot), count=1)
    return acc


@gluon.jit
def _store(acc, given, first, ROWS: tl.constexpr, BIAS: tl.constexpr, SUMS: tl.constexpr,
           LINES: tl.constexpr):  # fmt: skip
    """Stores 64 outputs from `first` on, whose sums [64, ROWS] lack the factors of rows."""
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    acc *= gl.load(given.factors + row)[None, :]
    if BIAS:
        output = first + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        acc += gl.load(given.bias + output, mask=output < given.outputs, other=0.0).to(gl.float32)[:, None]
    result = gl.convert_layout(acc.to(given.out.dtype.element_ty), LINES)
    column = first + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    line = gl.arange(0, ROWS, gl.SliceLayout(0, LINES))
    inside = (column < given.outputs)[:, None] & (line < given.rows)[None, :]
    gl.store(given.out + line[None, :] * given.outputs + column[:, None], result, mask=inside)


@gluon.jit
def _place(given, program, tile, PART: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr):
    """Where a program keeps its sums of a tile: of programs and tiles that meet, each pair has another sum."""
    line = gl.arange(0, 64, gl.SliceLayout(1, SUMS))[:, None]
    inner = line * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))[None, :]
    return given.sums + ((program + tile) * (2 * OWN) + PART) * (64 * ROWS) + inner


@gluon.jit
def _finish(acc, given, share, tile, FIRST: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr,
            SUMS: tl.constexpr, LINES: tl.constexpr):  # fmt: skip
    """Stores a tile, or keeps the sums of it; the last program that does so adds them up and stores it."""
    first = tile * share.steps // share.each
    others = ((tile + 1) * share.steps - 1) // share.each - first
    last = others == 0
    if others > 0:
        for kept in gl.static_range(OWN):
            gl.store(_place(given, gl.program_id(0), tile, FIRST + kept, OWN, ROWS, SUMS), acc[kept])
        barrier()
        arrived = given.arrived + tile * 2 + FIRST // OWN
        last = gl.atomic_add(arrived, 1, sem="acq_rel") == others
        if last:
            gl.store(arrived, 0)
    if last:
        for own in gl.static_range(OWN):
            total = acc[own]
            if others > 0:
                total = gl.zeros([64, ROWS], gl.float32, SUMS)
                for program in range(first, first + others + 1):
                    place = _place(given, program, tile, FIRST + own, OWN, ROWS, SUMS)
                    total += gl.load(place, cache_modifier=".cg")
            _store(total, given, (tile * (2 * OWN) + FIRST + own) * 64, ROWS, BIAS, SUMS, LINES)


@gluon.jit
def _empty(OWN: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr):
    """Sums of nothing."""
    found = _nothing()
    for _ in gl.static_range(OWN):
        found = _with(found, gl.zeros([64, ROWS], gl.float32, SUMS))
    return found


@gluon.jit
def _multiply(
    given, ring, share, WARPGROUP: tl.constexpr, OWN: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    WORDS: tl.constexpr, SUMS: tl.constexpr, LINES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: step after step, whose scales are loaded one step before."""
    FIRST: tl.constexpr = WARPGROUP * OWN
    tile, column = share.begin // share.steps, share.begin % share.steps
    scales = _scales_of(given, tile, column, FIRST, OWN, CHUNKS, GROUP, WIDTH, ZEROS, SUMS)
    await_previous(CHAINED)
    acc = _empty(OWN, ROWS, SUMS)
    own = share.end - share.begin
    for at in range(own):
        next_tile, next_column = _next(tile, column, share.steps)
        following = _scales_of(given, next_tile, next_column, FIRST, OWN, CHUNKS, GROUP, WIDTH, ZEROS, SUMS)
        acc = _add_step(
            acc, scales, given, ring, tile, column, at, FIRST, OWN, CHUNKS, STAGES, ROWS, WIDTH, ZEROS, WORDS, SUMS
        )
        if (next_column == 0) | (at + 1 == own):
            _finish(acc, given, share, tile, FIRST, OWN, ROWS, BIAS, SUMS, LINES)
            acc = _empty(OWN, ROWS, SUMS)
        scales, tile, column = following, next_tile, next_column


@gluon.jit(do_not_specialize=["rows", "groups", "units", "steps", "each", "steps_of_all"])
def _nibbled(
    halves, x_sums, factors, codes, scales, zeros, bias, out, sums, arrived, rows, outputs, groups, units, steps, each,
    steps_of_all, OWN: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, REGISTERS: tl.constexpr,
    FETCHING: tl.constexpr, WORDS: tl.constexpr, SUMS: tl.constexpr, LINES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = 128 // WIDTH
    begin = gl.program_id(0) * each
    share = Share(begin, gl.minimum(begin + each, steps_of_all), steps, each)
    if _ASM:
        given = Given(
            None, None, x_sums, factors, scales, zeros, bias, out, sums, arrived, rows, outputs, groups, units
        )
        ring = Ring(
            gl.allocate_shared_memory(codes.dtype, [STAGES * CHUNKS, 128 * OWN, 64], gl.NVMMASharedLayout(64, 8, 2)),
            gl.allocate_shared_memory(
                halves.dtype, [STAGES * CHUNKS * COUNT, 2 * ROWS, WIDTH], gl.NVMMASharedLayout(WIDTH, 8, 2)
            ),
            gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
            gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        )
        for slot in gl.static_range(STAGES):
            mbarrier.init(ring.ready.index(slot), count=1)
            mbarrier.init(ring.free.index(slot), count=2)
        fence_async_shared()
        gl.warp_specialize([
            (_multiply, (
                given, ring, share, 0, OWN, CHUNKS, STAGES, ROWS, GROUP, WIDTH, ZEROS, BIAS, WORDS, SUMS, LINES, CHAINED
            )),
            (_multiply, (
                given, ring, share, 1, OWN, CHUNKS, STAGES, ROWS, GROUP, WIDTH, ZEROS, BIAS, WORDS, SUMS, LINES, CHAINED
            )),
            (_fetch, (halves, codes, ring, share, CHUNKS, CHUNKS * COUNT, STAGES, CHAINED)),
        ], [4, 1], [REGISTERS, FETCHING])  # fmt: skip
    else:
        given = Given(
            halves, codes, x_sums, factors, scales, zeros, bias, out, sums, arrived, rows, outputs, groups, units
        )
        for warpgroup in gl.static_range(2):
            _multiply(
                given, Ring(x_sums, x_sums, x_sums, x_sums), share, warpgroup, OWN, CHUNKS, STAGES, ROWS, GROUP, WIDTH,
                ZEROS, BIAS, WORDS, SUMS, LINES, CHAINED,
            )  # fmt: skip


@lru_cache(maxsize=16)
def _layouts(width: int, room: int) -> dict[str, object]:
    """How a warpgroup holds the bytes of a chunk, the sums, and results that it stores by 16 bytes."""
    # four bytes at a time of the columns of a product; then those of other outputs, and of the chunk's next products
    ours = width // 8
    of_thread = [[0, 1 << bit] for bit in range(ours.bit_length() - 1)]
    further = [[0, width >> 1 << bit] for bit in range((CHUNK // width).bit_length() - 1)]
    return {
        "WORDS": gl.DistributedLinearLayout(
            [*of_thread, [8, 0], *further], [[0, ours], [0, 2 * ours], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
            [64, 64],
        ),
        "SUMS": gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, room, 32]),
        "LINES": gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]),
    }  # fmt: skip


def product(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None = None,
    bias: Tensor | None = None, tile: NibbleTile | None = None,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b for bfloat16 x [rows, K], its columns contiguous, and nibbles int32 [N, K / 8] that `nibble_tiles.fits`.

    Two launches. The device and the tile decide in which order steps are added up.
    """
    split = split_rows(x, width_of(block[1], x.shape[1]))
    return split_product(split, len(x), codes, scales, block, zeros, bias, x.dtype, tile)


def split_product(
    split: tuple[Tensor, Tensor, Tensor], rows: int, codes: Tensor, scales: Tensor, block: tuple[int, int],
    zeros: Tensor | None, bias: Tensor | None, dtype: torch.dtype, tile: NibbleTile | None = None,
) -> Tensor:  # fmt: skip
    """As `product`, of rows as `split_rows` makes them; one launch."""
    halves, x_sums, factors = split
    outputs, (double, depth), groups = len(codes), halves.shape, scales.shape[-1]
    width, room = width_of(block[1], depth), double // 2
    most = num_multiprocessors(halves.device)
    tile = tile or tile_for(outputs, depth, rows, width, most)
    tiles, steps = triton.cdiv(outputs, tile.outputs), triton.cdiv(depth, CHUNK * tile.chunks)
    programs = min(tiles if tile.whole else tiles * steps, most)
    each = triton.cdiv(tiles, programs) * steps if tile.whole else triton.cdiv(tiles * steps, programs)
    programs = triton.cdiv(tiles * steps, each)
    out = torch.empty((rows, outputs), dtype=dtype, device=halves.device)
    kept = (programs + tiles) * tile.outputs * room if each % steps else 1
    sums = torch.empty(kept, dtype=torch.float32, device=halves.device)
    limit, registers = _REGISTERS[tile.own]
    _nibbled[(programs,)](
        _source(halves, double, width), x_sums, factors, _source(codes.view(torch.uint8), tile.outputs, CHUNK // 2),
        scales, zeros, bias, out, sums, arrivals(halves.device, WARPGROUPS * tiles), rows, outputs, groups,
        depth // width, steps, each, tiles * steps,
        OWN=tile.own, CHUNKS=tile.chunks, STAGES=tile.stages, ROWS=room, GROUP=block[1] if groups > 1 else 0,
        WIDTH=width, ZEROS=zeros is not None, BIAS=bias is not None, REGISTERS=registers, FETCHING=_FETCHING_REGISTERS,
        num_warps=4, **_layouts(width, room), **({} if INTERPRETED else {"maxnreg": limit}), **chained(halves.device),
    )  # fmt: skip
    return out


def _source(matrix: Tensor, rows: int, columns: int) -> Any:
    """Describes bulk copies of `rows` × `columns` bytes; outside of the matrix they read zeros."""
    if INTERPRETED:
        return matrix
    return TensorDescriptor.from_tensor(matrix, [rows, columns], gl.NVMMASharedLayout(columns, 8, 2))
