"""Products of 9 to 64 rows with nibbles whose codes and rows come through a ring of shared memory, for Hopper.

Two warpgroups decode nibbles in registers, straight into the left operand of warpgroup matrix instructions, and decode
the next ones while these run. Four more warps fetch ahead of them: codes by bulk copies, the first while the kernel
before this one ends; rows of x and scales by loads, since the columns of x must lie in the order in which threads hold
codes, and scales in that of the outputs of a warpgroup. A program computes an equal share of all steps of all tiles;
where several share a tile, the last of them to end adds the sums up, always in the same order. Codes are as in
`frame.kernels.quantized`.
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
from .chain import await_previous, chained
from .coded_fragments import _nibbles
from .coded_rows import arrivals
from .linear_invariant import num_multiprocessors

#: Columns of a step, and those that have one scale; the most rows of x.
STEP, GROUP, MOST_ROWS = 256, 128, 64


class Ring(NamedTuple):
    """Shared memory of steps: codes, rows of x (64 columns of each apart), scales; and barriers: arrived, and free."""

    codes: Any
    rows: Any
    scales: Any
    ready: Any
    free: Any


class Share(NamedTuple):
    """The steps from `begin` to below `end` of all steps of all tiles; the steps of a tile, and of a program."""

    begin: Any
    end: Any
    steps: Any
    each: Any


class Given(NamedTuple):
    """What a product is of, and where it goes: sums of shared tiles first, whose arrivals are counted."""

    x: Any
    scales: Any
    bias: Any
    out: Any
    sums: Any
    arrived: Any
    rows: Any
    outputs: Any
    groups: Any
    stride_x: Any


@gluon.jit
def _row_of(place):
    """The row of a tile of codes that is output `place` of a warpgroup: eight threads read other banks this way."""
    return place // 8 * 8 + (place & 1) * 4 + (place & 7) // 2


@gluon.jit
def _begin(source, ring, tile, column, slot, BLOCK_N: gl.constexpr):
    """Begins the copy of the codes of a tile's step `column`."""
    ready = ring.ready.index(slot)
    mbarrier.expect(ready, BLOCK_N * 128)
    tma.async_copy_global_to_shared(source, [tile * BLOCK_N, column * 32], ready, ring.codes.index(slot))


@gluon.jit
def _scales_of(given, tile, column, half: gl.constexpr, BLOCK_N: gl.constexpr, LINE: gl.constexpr):
    """The scales of half a step, in the order of the sums."""
    output = gl.minimum(tile * BLOCK_N + _row_of(gl.arange(0, BLOCK_N, LINE)), given.outputs - 1)
    return gl.load(given.scales + output * given.groups + column * 2 + half)


@gluon.jit
def _next(tile, column, steps):
    """The step behind one, which may be that of another tile."""
    ends = column + 1 == steps
    return gl.where(ends, tile + 1, tile), gl.where(ends, 0, column + 1)


@gluon.jit
def _keep(ring, slot, half: gl.constexpr, values, scales, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """Stores half a step's columns of x in the order in which threads hold codes, and its scales."""
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # [row, thread, word, pair, one of two]
    apart = gl.permute(gl.reshape(values, (BLOCK_M, 4, 4, 4, 2)), (0, 2, 3, 1, 4))
    halves = ring.rows._reinterpret(ring.rows.dtype, [STAGES * 2, BLOCK_M, 128], KIND)
    halves.index(slot * 2 + half).store(gl.reshape(apart, (BLOCK_M, 128)))
    numbers = ring.scales._reinterpret(gl.float32, [STAGES * 2, scales.shape[0]], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    numbers.index(slot * 2 + half).store(scales.to(gl.float32))


@gluon.jit
def _fetch(
    source, ring, given, share, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, LINE: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """The fetching warps: step after step into whatever place is free."""
    for early in gl.static_range(STAGES):
        number = share.begin + early
        if number < share.end:
            _begin(source, ring, number // share.steps, number % share.steps, early, BLOCK_N)
    await_previous(CHAINED)
    row = gl.minimum(gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS)), given.rows - 1)
    lane = gl.arange(0, 128, gl.SliceLayout(0, ROWS))
    x = given.x + row[:, None] * given.stride_x + lane[None, :]
    tile, column = share.begin // share.steps, share.begin % share.steps
    first = gl.load(x + column * 256, cache_modifier=".cg")
    first_scales = _scales_of(given, tile, column, 0, BLOCK_N, LINE)
    for at in range(share.end - share.begin):
        slot = at % STAGES
        second = gl.load(x + (column * 256 + 128), cache_modifier=".cg")
        second_scales = _scales_of(given, tile, column, 1, BLOCK_N, LINE)
        if at >= STAGES:
            mbarrier.wait(ring.free.index(slot), ((at // STAGES) & 1) ^ 1)
            _begin(source, ring, tile, column, slot, BLOCK_N)
        _keep(ring, slot, 0, first, first_scales, BLOCK_M, STAGES)
        tile, column = _next(tile, column, share.steps)
        first = gl.load(x + column * 256, cache_modifier=".cg")
        first_scales = _scales_of(given, tile, column, 0, BLOCK_N, LINE)
        _keep(ring, slot, 1, second, second_scales, BLOCK_M, STAGES)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ring.ready.index(slot), count=1)


@gluon.jit
def _words_of(codes, half: gl.constexpr, WORDS: gl.constexpr, PART: gl.constexpr):
    """The words of half a step of 128 outputs as those of 64 columns each, for outputs in the order of the sums."""
    # [eight, its highest bit, the next, the lowest, half, thread, two words, one of two]
    apart = gl.reshape(codes.load(WORDS), (16, 2, 2, 2, 2, 4, 2, 2))
    apart = gl.permute(apart, (0, 2, 3, 1, 5, 7, 6, 4))
    halves = gl.split(gl.reshape(apart, (1, 128, 8, 2, 2)))
    first, second = gl.split(halves[half])
    return gl.convert_layout(first, PART, assert_trivial=True), gl.convert_layout(second, PART, assert_trivial=True)


@gluon.jit
def _left(words, dtype: gl.constexpr, SUMS: gl.constexpr):
    """The left operand [128, 64] of words [1, 128, 8]."""
    BITS: gl.constexpr = 0x43084308 if dtype == gl.bfloat16 else 0x64086408
    found = _nibbles(words, gl.full_like(words, BITS), dtype)
    # [output, thread, one of two words, pair by its bits, one of two]
    found = gl.permute(gl.reshape(found, (128, 4, 2, 2, 2, 2)), (0, 2, 3, 4, 1, 5))
    return gl.convert_layout(gl.reshape(found, (128, 64)), gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _half_of(
    ring, slot, half: gl.constexpr, part: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    WORDS: gl.constexpr, PART: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Half a step's codes of 128 outputs: (the left operand of the first 64 columns, the words of the others)."""
    codes = ring.codes._reinterpret(gl.int32, [STAGES * PARTS, 128, 32], gl.NVMMASharedLayout(128, 32, 2))
    first, second = _words_of(codes.index(slot * PARTS + part), half, WORDS, PART)
    return _left(first, ring.rows.dtype, SUMS), second


@gluon.jit
def _begin_half(left, ring, slot, half: gl.constexpr, SUMS: gl.constexpr):
    """The product of half a step's first 64 columns, which has only begun."""
    BLOCK_M: gl.constexpr = ring.rows.shape[1]
    empty = gl.zeros([128, BLOCK_M], gl.float32, SUMS)
    right = ring.rows.index(slot * 4 + half * 2).permute((1, 0))
    return warpgroup_mma(left, right, empty, use_acc=False, is_async=True)


@gluon.jit
def _end_half(begun, words, ring, slot, half: gl.constexpr, SUMS: gl.constexpr):
    """That product with the one of the other 64 columns, which has only begun."""
    right = ring.rows.index(slot * 4 + half * 2 + 1).permute((1, 0))
    return warpgroup_mma(_left(words, ring.rows.dtype, SUMS), right, begun, is_async=True)


@gluon.jit
def _scaled(
    sums, product, ring, slot, at: gl.constexpr, PARTS: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """The sums and a product of a step, number `at`, that has ended, times its scales."""
    scale = ring.scales.index(slot * 2 * PARTS + at).load(gl.SliceLayout(1, SUMS))
    return _replaced(sums, sums[at % PARTS] + product * scale[:, None], at % PARTS, PARTS)


@gluon.jit
def _add_step(
    sums, ring, slot, PARTS: gl.constexpr, STAGES: gl.constexpr, TWICE: gl.constexpr, WORDS: gl.constexpr,
    PART: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The sums and the products of a step: codes are decoded while the products of those before them run.

    If TWICE, a product begins before the one before it has ended, which takes as many registers again.
    """
    left, words = _half_of(ring, slot, 0, 0, PARTS, STAGES, WORDS, PART, SUMS)
    last = _begin_half(left, ring, slot, 0, SUMS)
    last = _end_half(last, words, ring, slot, 0, SUMS)
    for at in gl.static_range(1, 2 * PARTS):
        left, words = _half_of(ring, slot, at // PARTS, at % PARTS, PARTS, STAGES, WORDS, PART, SUMS)
        if TWICE:
            begun = _begin_half(left, ring, slot, at // PARTS, SUMS)
            ended = warpgroup_mma_wait(1, deps=[last])
            last = _end_half(begun, words, ring, slot, at // PARTS, SUMS)
            sums = _scaled(sums, ended, ring, slot, at - 1, PARTS, SUMS)
        else:
            ended, left = warpgroup_mma_wait(0, deps=[last, left])  # codes are decoded before
            sums = _scaled(sums, ended, ring, slot, at - 1, PARTS, SUMS)
            last = _begin_half(left, ring, slot, at // PARTS, SUMS)
            last = _end_half(last, words, ring, slot, at // PARTS, SUMS)
    return _scaled(sums, warpgroup_mma_wait(0, deps=[last]), ring, slot, 2 * PARTS - 1, PARTS, SUMS)


@gluon.jit
def _replaced(values, value, at: gl.constexpr, COUNT: gl.constexpr):
    """The first one or two values, with another one at `at`."""
    if COUNT == 1:
        values = (value,)
    elif at == 0:
        values = (value, values[1])
    else:
        values = (values[0], value)
    return values


@gluon.jit
def _store(acc, given, first, BIAS: gl.constexpr):
    """Stores 128 outputs from `first` on."""
    SUMS: gl.constexpr = acc.type.layout
    output = first + _row_of(gl.arange(0, acc.shape[0], gl.SliceLayout(1, SUMS)))
    row = gl.arange(0, acc.shape[1], gl.SliceLayout(0, SUMS))
    there = output < given.outputs
    if BIAS:
        acc += gl.load(given.bias + output, mask=there, other=0.0).to(gl.float32)[:, None]
    place = given.out + row[None, :] * given.outputs + output[:, None]
    gl.store(place, acc.to(given.out.dtype.element_ty), mask=(row < given.rows)[None, :] & there[:, None])


@gluon.jit
def _place(given, program, number, part: gl.constexpr, SUMS: gl.constexpr, BLOCK_M: gl.constexpr, PARTS: gl.constexpr):
    """Where a program keeps its sums of a tile: of programs and tiles that meet, each pair has another sum."""
    line = gl.arange(0, 128, gl.SliceLayout(1, SUMS))[:, None]
    inner = line * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS))[None, :]
    return given.sums + ((program + number) * PARTS + part) * (128 * BLOCK_M) + inner


@gluon.jit
def _sum_of(given, tile, first, last, part: gl.constexpr, like, PARTS: gl.constexpr):
    """The sum over the programs from `first` to `last`."""
    SUMS: gl.constexpr = like.type.layout
    total = gl.zeros([128, like.shape[1]], gl.float32, SUMS)
    for program in range(first, last + 1):
        place = _place(given, program, tile, part, SUMS, like.shape[1], PARTS)
        total += gl.load(place, cache_modifier=".cg")
    return total


@gluon.jit
def _finish(sums, given, share, tile, whole, BIAS: gl.constexpr, PARTS: gl.constexpr):
    """Stores a tile, or keeps a program's sums of it; the last program that does so adds them up and stores it."""
    SUMS: gl.constexpr = sums[0].type.layout
    BLOCK_M: gl.constexpr = sums[0].shape[1]
    if whole:
        for part in gl.static_range(PARTS):
            _store(sums[part], given, (tile * PARTS + part) * 128, BIAS)
    else:
        first = tile * share.steps // share.each
        last = ((tile + 1) * share.steps - 1) // share.each
        for own in gl.static_range(PARTS):
            gl.store(_place(given, gl.program_id(0), tile, own, SUMS, BLOCK_M, PARTS), sums[own])
        barrier()
        if gl.atomic_add(given.arrived + tile, 1, sem="acq_rel") == last - first:
            for one in gl.static_range(PARTS):
                total = _sum_of(given, tile, first, last, one, sums[one], PARTS)
                _store(total, given, (tile * PARTS + one) * 128, BIAS)
            gl.store(given.arrived + tile, 0)


@gluon.jit
def _multiply(
    ring, given, share, BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, TWICE: gl.constexpr,
    BIAS: gl.constexpr, WORDS: gl.constexpr, PART: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The two multiplying warpgroups: tile after tile."""
    at = 0
    for tile in range(share.begin // share.steps, (share.end + share.steps - 1) // share.steps):
        first = gl.maximum(share.begin, tile * share.steps)
        last = gl.minimum(share.end, (tile + 1) * share.steps)
        empty = gl.zeros([128, BLOCK_M], gl.float32, SUMS)
        sums = _replaced((empty, empty), empty, 0, PARTS)
        for _ in range(first, last):
            slot = at % STAGES
            mbarrier.wait(ring.ready.index(slot), (at // STAGES) & 1)
            sums = _add_step(sums, ring, slot, PARTS, STAGES, TWICE, WORDS, PART, SUMS)
            barrier()
            mbarrier.arrive(ring.free.index(slot), count=1)
            at += 1
        _finish(sums, given, share, tile, last - first == share.steps, BIAS, PARTS)


@gluon.jit(do_not_specialize=["rows", "outputs", "groups", "steps", "each", "steps_of_all"])
def _coded_hopper(
    x, codes, scales, bias, out, sums, arrived, rows, outputs, groups, stride_x, steps, each, steps_of_all,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, FETCHERS: gl.constexpr,
    TWICE: gl.constexpr, BIAS: gl.constexpr, WORDS: gl.constexpr, PART: gl.constexpr, SUMS: gl.constexpr,
    ROWS: gl.constexpr, LINE: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x.dtype.element_ty
    BLOCK_N: gl.constexpr = 128 * PARTS
    begin = gl.program_id(0) * each
    share = Share(begin, gl.minimum(begin + each, steps_of_all), steps, each)
    given = Given(x, scales, bias, out, sums, arrived, rows, outputs, groups, stride_x)
    ring = Ring(
        gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, 32], gl.NVMMASharedLayout(128, 32, 2)),
        gl.allocate_shared_memory(dtype, [STAGES * 4, BLOCK_M, 64], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.float32, [STAGES * 2 * PARTS, 128], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )  # fmt: skip
    for slot in gl.static_range(STAGES):
        mbarrier.init(ring.ready.index(slot), count=2)  # the codes, and all else
        mbarrier.init(ring.free.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (ring, given, share, BLOCK_M, PARTS, STAGES, TWICE, BIAS, WORDS, PART, SUMS)),
        (_fetch, (codes, ring, given, share, BLOCK_M, BLOCK_N, STAGES, ROWS, LINE, CHAINED)),
    ], [FETCHERS], [REGISTERS])  # fmt: skip


@dataclass(frozen=True)
class Staged:
    """128 outputs of a tile once or twice, steps on their way, warps that fetch, whether two products of a
    warpgroup run at once, and registers of a thread that fetches.

    Eight warps fetch 64 rows only; registers are as many as are needed where none are given.
    """

    parts: int
    stages: int
    fetchers: int = 4
    twice: bool = True
    registers: int = 0

    def shared_bytes(self, rows: int) -> int:
        """Shared memory of a program, without barriers."""
        outputs = 128 * self.parts
        return self.stages * (outputs * STEP // 2 + rows_of(rows) * STEP * 2 + outputs * 2 * 4)


def rows_of(rows: int) -> int:
    """The rows of a program that multiplies so many."""
    return max(16, 1 << (rows - 1).bit_length())


def _bits(count: int) -> int:
    return count.bit_length() - 1


@lru_cache(maxsize=64)
def _layouts(block_m: int, fetchers: int) -> dict[str, object]:
    """How threads hold a part's words of a step, a quarter of them, the sums, rows of x, and scales."""
    warps = [[16 << bit] for bit in range(3)]
    # threads of neighbouring outputs of the sums read rows whose chunks lie in other banks
    words = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16]], [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]], [[*one, 0] for one in warps], [],
        [128, 32],
    )  # fmt: skip
    part = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, *one, 0] for one in warps], [], [1, 128, 8],
    )  # fmt: skip
    # a thread loads 16 bytes of each of four threads' words, and stores 16 bytes for the four threads
    places = [[8 << bit, 0] for bit in range(_bits(block_m) - 3)]
    of_warps = places[: _bits(fetchers)] + [[0, 64]] * (block_m == 16)
    of_thread = [[0, 1], [0, 2], [0, 4], [0, 32]] + [[0, 64]] * (block_m > 16) + places[_bits(fetchers) :]
    rows = gl.DistributedLinearLayout(
        of_thread, [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]], of_warps, [], [block_m, 128]
    )  # fmt: skip
    return {
        "WORDS": words, "PART": part, "ROWS": rows, "LINE": gl.BlockedLayout([1], [32], [fetchers], [0]),
        "SUMS": gl.NVMMADistributedLayout([3, 0], [8, 1], [16, block_m, 16]),
    }  # fmt: skip


def fits(codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None) -> bool:
    """Whether `product` takes the weight: nibbles with scales of groups of 128 columns, and 8 as their zero."""
    return (
        codes.dtype == torch.int32
        and codes.dim() == 2
        and codes.is_contiguous()
        and codes.data_ptr() % 16 == 0
        and codes.shape[1] * 8 % STEP == 0
        and scales.is_contiguous()
        and scales.shape[-1] == codes.shape[1] * 8 // GROUP
        and block == (1, GROUP)
        and zeros is None
    )


def product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, sizes: Staged) -> Tensor:
    """x Wᵀ + b for x [rows, K] of 16 bits, up to 64 rows, and codes that `fits`; one launch.

    The device and the parts of a tile decide in which order steps are added up.
    """
    rows, outputs, block_n = len(x), len(codes), 128 * sizes.parts
    block_m, steps = rows_of(rows), codes.shape[1] * 8 // STEP
    fetchers = sizes.fetchers if block_m == 64 else 4
    tiles = triton.cdiv(outputs, block_n)
    each = triton.cdiv(tiles * steps, min(tiles * steps, num_multiprocessors(x.device)))
    programs = triton.cdiv(tiles * steps, each)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    room = (programs + tiles) * block_n * block_m if each % steps else 1
    sums = torch.empty(room, dtype=torch.float32, device=x.device)
    source = TensorDescriptor(
        codes, list(codes.shape), list(codes.stride()), [block_n, 32], gl.NVMMASharedLayout(128, 32, 2)
    )
    _coded_hopper[(programs,)](
        x, source, scales, bias, out, sums, arrivals(x.device, tiles), rows, outputs, scales.shape[1], x.stride(0),
        steps, each, tiles * steps, BLOCK_M=block_m, PARTS=sizes.parts, STAGES=sizes.stages,
        REGISTERS=sizes.registers or (96 if block_m < 64 else 72 if fetchers == 8 else 112 + 8 * sizes.parts),
        FETCHERS=fetchers, TWICE=sizes.twice, BIAS=bias is not None, num_warps=8, **_layouts(block_m, fetchers),
        **chained(x.device),
    )  # fmt: skip
    return out
