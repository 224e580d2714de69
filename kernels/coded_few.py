"""Products of blocks of few pairs with experts whose weights are 4-bit floats, for Hopper, in Gluon; for
`coded_experts`, whose plain kernel is the twin that other chips and the interpreter run.

A program computes some outputs of a block, and its warps divide the inputs among them. A thread reads 16 bytes of
a row of codes, 32 weights, into registers, which is what the matrix unit wants of it if inputs are counted in an order
that suits: the codes of a word make four pairs of numbers, places 4 apart, and the rows of x are read in the same
order. So nothing passes through shared memory but the warps' sums. The scale of the 32 multiplies them, two at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .barriers import barrier
from .chain import await_previous, chained
from .expert_launch import Tile
from .gating import Gating, constants, gate_alone, gate_times
from .routing import Blocks

#: Inputs that a warp multiplies in a step: 16 bytes of each row for each of four threads.
WIDTH = 128
#: Columns of a scale.
GROUP = 32
#: What scales are divided by, and sums multiplied, so that a scale times what codes lack in exponent is a bfloat16.
_LATE = gl.constexpr(2.0**32)


@gluon.jit
def _scaled(both, factor):
    """Two bfloat16 in each word: codes at the lowest 4 bits of both halves or, SHIFT, above, times two factors."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [both, factor], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _halves(pair):
    """[..., 2] of the two bfloat16 in each word."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(low.to(gl.bfloat16, bitcast=True), high.to(gl.bfloat16, bitcast=True))


@gluon.jit
def _pair(words, factor, PLACE: gl.constexpr):
    """[..., 2]: the numbers of codes PLACE and PLACE + 4 of each word, times `factor`."""
    if PLACE >= 2:
        words = words >> 8
    SHIFT: gl.constexpr = 4 * (PLACE % 2)
    both = words & (0x000F000F << SHIFT)
    # the sign to its place, and the other bits to the ends of exponent and mantissa: 0x81C081C0
    both = (both * ((1 << (12 - SHIFT)) + (1 << (6 - SHIFT)))) & -2118090304
    return _halves(_scaled(both, factor))


@gluon.jit
def _numbers(words, scale, OPERAND: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """bfloat16 [WARPS, BLOCK_N, 128] of words [WARPS, BLOCK_N, 4, 4] and scales [WARPS, BLOCK_N, 4]."""
    factor = ((scale.to(gl.int32) + 94) * 0x00800080).expand_dims(3)
    even = gl.join(_pair(words, factor, 0), _pair(words, factor, 1))
    odd = gl.join(_pair(words, factor, 2), _pair(words, factor, 3))
    every = gl.join(even, odd)  # thread, word, half, place % 2, place // 2
    every = every.permute((0, 1, 3, 6, 5, 2, 4)).reshape((WARPS, BLOCK_N, 128))
    return gl.convert_layout(every, OPERAND, assert_trivial=True)


@gluon.jit
def _read(codes, scales, words_at, scales_at, chunk, step, DEPTH: gl.constexpr, PARTS: gl.constexpr):
    """Words and scales of a step of PARTS times 128 inputs, of which the last one may lack some."""
    codes += words_at + step * (PARTS * 16)
    scales += scales_at + step * (PARTS * 4)
    if (step + 1) * (PARTS * 128) <= DEPTH:
        words, scale = gl.load(codes), gl.load(scales)
    else:
        kept = step * (PARTS * 4) + chunk < DEPTH // 32
        words = gl.load(codes, mask=kept.expand_dims(3), other=0)
        scale = gl.load(scales, mask=kept, other=0)
    return words, scale


@gluon.jit
def _read_rows(x, x_at, chunk, step, DEPTH: gl.constexpr, PARTS: gl.constexpr):
    """Rows of x in a step."""
    x += x_at + step * (PARTS * 128)
    if (step + 1) * (PARTS * 128) <= DEPTH:
        values = gl.load(x)
    else:
        values = gl.load(x, mask=step * (PARTS * 4) + chunk < DEPTH // 32, other=0.0)
    return values


@gluon.jit
def _operand(values, OPERAND: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr):
    """bfloat16 [WARPS, 128, ROWS] of x [WARPS, ROWS, 4, 4, 8], in the order of `_numbers`."""
    values = values.reshape((WARPS, ROWS, 4, 4, 2, 2, 2)).permute((0, 3, 5, 6, 2, 4, 1))
    return gl.convert_layout(values.reshape((WARPS, 128, ROWS)), OPERAND, assert_trivial=True)


@gluon.jit(do_not_specialize=["pairs", "first_id"])
def _few_rows(
    x, stride_x, weight, bias, out, blocks, pairs, experts, first_id, size,
    DEPTH: gl.constexpr, SHARED: gl.constexpr, ALONE: gl.constexpr, CHAINED: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, AHEAD: gl.constexpr, BIASED: gl.constexpr, FUNCTION: gl.constexpr,
    ALPHA: gl.constexpr, SHIFT: gl.constexpr, LIMIT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    OUTPUTS: gl.constexpr = _outputs_apart(num_warps, BLOCK_N)
    WARPS: gl.constexpr = num_warps // OUTPUTS  # that divide the inputs
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, OUTPUTS, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    WORDS: gl.constexpr = _words_layout(WARPS, OUTPUTS, BLOCK_N)
    VALUES: gl.constexpr = _values_layout(WARPS, OUTPUTS, ROWS)
    await_previous(CHAINED, True)
    codes, scales = weight
    slots, block_experts, num_blocks = blocks
    num_tiles = gl.cdiv(size, BLOCK_N)
    block = gl.program_id(0) // num_tiles
    tile = gl.program_id(0) % num_tiles
    if ALONE:
        chosen = gl.load(slots + block) - first_id
        if (chosen < 0) | (chosen >= experts):
            return
        expert = chosen.to(gl.int64)
    else:
        if block >= gl.load(num_blocks):
            return
        expert = gl.load(block_experts + block).to(gl.int64)
    # places of what a thread reads in the first step
    ROW: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, WORDS))
    split = gl.arange(0, WARPS, gl.SliceLayout(1, ROW)).expand_dims(1).expand_dims(2)
    output = gl.arange(0, BLOCK_N, gl.SliceLayout(0, ROW)).expand_dims(0).expand_dims(2)
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS)))).expand_dims(0)
    thread = thread.expand_dims(1)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))).expand_dims(0)
    word = word.expand_dims(1).expand_dims(2)
    column = tile * BLOCK_N + output
    start = expert * (2 if GATED else 1) * size
    line = start + gl.where(column < size, column, 0)
    chunk = split * 4 + thread
    words_at = (line * (DEPTH // 8) + chunk * 4).expand_dims(3) + word
    scales_at = line * (DEPTH // 32) + chunk
    # and of x
    ROW_X: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, VALUES)))
    THREAD_X: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, VALUES))))
    WORD_X: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, VALUES))))
    LANE_X: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, VALUES))))
    place = gl.arange(0, ROWS, gl.SliceLayout(0, ROW_X))
    if ALONE:
        row = (place * 0 + block) // SHARED
    else:
        some = gl.load(slots + block * ROWS)
        slot = gl.load(slots + block * ROWS + place)
        row = gl.where(slot < pairs, slot, some) // SHARED
    row = row.to(gl.int64).expand_dims(0).expand_dims(2).expand_dims(3).expand_dims(4)
    split_x = gl.arange(0, WARPS, gl.SliceLayout(1, ROW_X)).expand_dims(1).expand_dims(2).expand_dims(3).expand_dims(4)
    thread_x = gl.arange(0, 4, THREAD_X).expand_dims(0).expand_dims(1).expand_dims(3).expand_dims(4)
    word_x = gl.arange(0, 4, WORD_X).expand_dims(0).expand_dims(1).expand_dims(2).expand_dims(4)
    lane_x = gl.arange(0, 8, LANE_X).expand_dims(0).expand_dims(1).expand_dims(2).expand_dims(3)
    chunk_x = split_x * 4 + thread_x
    x_at = row * stride_x + (chunk_x * 32 + word_x * 8 + lane_x)
    STEPS: gl.constexpr = (DEPTH + 128 * WARPS - 1) // (128 * WARPS)
    sums = gl.zeros([WARPS, BLOCK_N, ROWS], gl.float32, SUMS)
    ups = sums
    up_codes, up_scales = codes + size.to(gl.int64) * (DEPTH // 8), scales + size.to(gl.int64) * (DEPTH // 32)
    coming, coming_ups, rows_coming = (), (), ()
    for step in gl.static_range(-AHEAD, STEPS):
        if step + AHEAD < STEPS:
            coming += (_read(codes, scales, words_at, scales_at, chunk, step + AHEAD, DEPTH, WARPS),)  # type: ignore[assignment]
            if GATED:
                coming_ups += (_read(up_codes, up_scales, words_at, scales_at, chunk, step + AHEAD, DEPTH, WARPS),)  # type: ignore[assignment]
        if step + (AHEAD > 0) >= 0 and step + (AHEAD > 0) < STEPS:
            rows_coming += (_read_rows(x, x_at, chunk_x, step + (AHEAD > 0), DEPTH, WARPS),)  # type: ignore[assignment]
        if AHEAD > 0:
            barrier()  # no memory is shared: the compiler would let loads begin when their registers are needed
        if step >= 0:
            right = _operand(rows_coming[step], RIGHT, WARPS, ROWS)
            sums = mma_v2(_numbers(coming[step][0], coming[step][1], LEFT, WARPS, BLOCK_N), right, sums)
            if GATED:
                left = _numbers(coming_ups[step][0], coming_ups[step][1], LEFT, WARPS, BLOCK_N)
                ups = mma_v2(left, right, ups)
    total = gl.sum(sums, 0) * _LATE
    TOTAL: gl.constexpr = gl.SliceLayout(0, SUMS)
    column = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, TOTAL)).expand_dims(1)
    place = gl.arange(0, ROWS, gl.SliceLayout(0, TOTAL)).expand_dims(0)
    there = column < size
    if BIASED:
        total += gl.load(bias + start + column, mask=there, other=0.0).to(gl.float32)
    if GATED:
        other = gl.sum(ups, 0) * _LATE
        if BIASED:
            other += gl.load(bias + start + size + column, mask=there, other=0.0).to(gl.float32)
        total = gate_times(total, other, FUNCTION, ALPHA, SHIFT, LIMIT)
    elif FUNCTION != "":
        total = gate_alone(total, FUNCTION, ALPHA, LIMIT)
    if ALONE:
        slot = gl.where(place == 0, block, pairs).to(gl.int64)
    else:
        slot = gl.load(slots + block * ROWS + place).to(gl.int64)
    gl.store(out + slot * size + column, total.to(out.dtype.element_ty), mask=there & (slot < pairs))


@gluon.constexpr_function
def _words_layout(splits, outputs, rows):
    """Of [splits, rows, threads, words]: a thread has four words of some rows, which `outputs` warps divide."""
    warps = [[0, 16 * at, 0, 0] for at in _powers(1, outputs)] + [[at, 0, 0, 0] for at in _powers(1, splits)]
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0]]
    registers += [[0, at, 0, 0] for at in _powers(16 * outputs, rows)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [splits, rows, 4, 4])


@gluon.constexpr_function
def _values_layout(splits, outputs, rows):
    """Of [splits, rows, threads, words, 8]: a thread has the 32 numbers of a row that its words multiply."""
    warps = [[0] * 5 for _ in _powers(1, outputs)] + [[at, 0, 0, 0, 0] for at in _powers(1, splits)]
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 0, 0, 1, 0], [0, 0, 0, 2, 0]]
    registers += [[0, at, 0, 0, 0] for at in _powers(8, rows)]
    lanes = [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [splits, rows, 4, 4, 8])


@gluon.constexpr_function
def _powers(least, end):
    found = []
    while least < end:
        found.append(least)
        least *= 2
    return found


@gluon.constexpr_function
def _outputs_apart(warps, rows):
    """Among how many warps the outputs are divided: those beyond four that divide the inputs, if there are outputs."""
    return min(rows // 16, max(1, warps // 4))


def product(
    x: Tensor, weight: Any, ids: Tensor, held: range, blocks: Blocks | None, tile: Tile, *, shared: int = 1,
    gating: Gating | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `coded_experts.coded_product`, of bfloat16 rows and a weight that `fits` takes; blocks of 8, 16 or 32."""
    gated = gating is not None and gating.gated
    size, depth = weight.codes.shape[1] // (2 if gated else 1), weight.codes.shape[2] * 8
    most, rows = (ids.numel(), 8) if blocks is None else blocks.slots.shape
    out = torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device)
    source = (ids, ids, ids) if blocks is None else (blocks.slots, blocks.experts, blocks.used)
    chain = chained(x.device) if blocks is None else {"CHAINED": False}
    _few_rows[(most * triton.cdiv(size, tile.block_n),)](
        x, x.stride(0), (weight.codes, weight.scales), out if bias is None else bias, out, source, ids.numel(),
        len(held), held.start, size,
        DEPTH=depth, SHARED=shared, ALONE=blocks is None, GATED=gated, ROWS=rows,
        BLOCK_N=tile.block_n, AHEAD=tile.block_k // WIDTH - 1, BIASED=bias is not None,
        **constants(gating), **chain, num_warps=tile.num_warps,
        maxnreg=_registers(tile),
    )  # fmt: skip
    return out


def _registers(tile: Tile) -> int | None:
    """The most registers of a thread with which as many programs share a multiprocessor as the tile has stages."""
    return None if tile.num_stages == 1 else min(255, 65536 // (32 * tile.num_warps * tile.num_stages) // 8 * 8)


def fits(x: Tensor, weight: Any) -> bool:
    """Whether the kernel multiplies rows of x by a weight: 4-bit floats with an exponent for 32 of them, whole."""
    codes, scales = weight.codes, weight.scales
    known = weight.is_float4 and scales.dtype == torch.uint8 and weight.numbers is None and weight.columns is None
    whole = codes.shape[2] * 8 == GROUP * scales.shape[2] and scales.shape[1] == codes.shape[1]
    return known and whole and x.dtype == torch.bfloat16 and x.stride(0) % 8 == 0 and codes.shape[2] % 4 == 0
