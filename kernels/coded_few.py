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
import triton.language as tl
from torch import Tensor

from .barriers import barrier as real_barrier
from .chain import await_previous, chained
from .coded_rows import arrivals
from .expert_launch import Tile
from .gating import Gating, constants, gate_alone, gate_times
from .portable import INTERPRETED, gl, gluon, mma_v2
from .routing import Blocks

barrier = gl.barrier if INTERPRETED else real_barrier
_ASM = tl.constexpr(not INTERPRETED)
#: Inputs that a warp multiplies in a step: 16 bytes of each row for each of four threads.
WIDTH = 128
#: Columns of a scale.
GROUP = 32
#: What scales are divided by, and sums multiplied, so that a scale times what codes lack in exponent is a bfloat16.
_LATE = tl.constexpr(2.0**32)


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
def _pair(words, factor, PLACE: tl.constexpr):
    """[..., 2]: the numbers of codes PLACE and PLACE + 4 of each word, times `factor`."""
    if PLACE >= 2:
        words = words >> 8
    SHIFT: tl.constexpr = 4 * (PLACE % 2)
    both = words & (0x000F000F << SHIFT)
    # the sign to its place, and the other bits to the ends of exponent and mantissa: 0x81C081C0
    both = (both * ((1 << (12 - SHIFT)) + (1 << (6 - SHIFT)))) & -2118090304
    if _ASM:
        found = _halves(_scaled(both, factor))
    else:
        low = (both << 16).to(gl.float32, bitcast=True) * (factor << 16).to(gl.float32, bitcast=True)
        high = (both & -65536).to(gl.float32, bitcast=True) * (factor & -65536).to(gl.float32, bitcast=True)
        found = gl.join(low, high)
    return found


@gluon.jit
def _numbers(words, scale, OPERAND: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """bfloat16 [WARPS, BLOCK_N, 128] of words [WARPS, BLOCK_N, 4, 4] and scales [WARPS, BLOCK_N, 4]."""
    factor = ((scale.to(gl.int32) + 94) * 0x00800080).expand_dims(3)
    even = gl.join(_pair(words, factor, 0), _pair(words, factor, 1))
    odd = gl.join(_pair(words, factor, 2), _pair(words, factor, 3))
    every = gl.join(even, odd)  # thread, word, half, place % 2, place // 2
    every = every.permute((0, 1, 3, 6, 5, 2, 4)).reshape((WARPS, BLOCK_N, 128))
    return gl.convert_layout(every, OPERAND, assert_trivial=True)


@gluon.jit
def _read(codes, scales, words_at, scales_at, chunk, step, DEPTH: tl.constexpr, PARTS: tl.constexpr):
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
def _read_rows(x, x_at, chunk, step, DEPTH: tl.constexpr, PARTS: tl.constexpr):
    """Rows of x in a step."""
    x += x_at + step * (PARTS * 128)
    if (step + 1) * (PARTS * 128) <= DEPTH:
        values = gl.load(x)
    else:
        values = gl.load(x, mask=step * (PARTS * 4) + chunk < DEPTH // 32, other=0.0)
    return values


@gluon.jit
def _operand(values, OPERAND: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """bfloat16 [WARPS, 128, ROWS] of x [WARPS, ROWS, 4, 4, 8], in the order of `_numbers`."""
    values = values.reshape((WARPS, ROWS, 4, 4, 2, 2, 2)).permute((0, 3, 5, 6, 2, 4, 1))
    return gl.convert_layout(values.reshape((WARPS, 128, ROWS)), OPERAND, assert_trivial=True)


@gluon.jit
def _sum_up(total, ids, sums, weights, out, token, experts, first_id, size, column, place, TOP_K: tl.constexpr):
    """Adds up what all pairs of a token have in some columns, in their order; `total` [BLOCK_N, ROWS] says how."""
    kept = (column < size) & (place == 0)
    for k in gl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = gl.load(ids + pair) - first_id
        inside = (expert >= 0) & (expert < experts)
        value = gl.load(sums + pair * size + column + place * 0, mask=kept & inside, other=0.0, cache_modifier=".cg")
        value = gl.where(inside, gl.load(weights + pair), 0.0) * value.to(gl.float32)
        total = value if k == 0 else total + value
    gl.store(out + token * size + column + place * 0, total.to(out.dtype.element_ty), mask=kept)


@gluon.jit(do_not_specialize=["pairs", "first_id"])
def _few_rows(
    x, stride_x, weight, bias, out, blocks, summing, pairs, experts, first_id, size,
    DEPTH: tl.constexpr, SHARED: tl.constexpr, ALONE: tl.constexpr, CHAINED: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, BIASED: tl.constexpr, FUNCTION: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr, TOP_K: tl.constexpr, EARLY: tl.constexpr,
    num_warps: tl.constexpr,
):  # fmt: skip
    # TOP_K > 0: the last program of a token's that ends adds up their results. EARLY: so many steps of codes are asked
    # for before the kernel before this one has ended, which must have waited for what chose the experts
    OUTPUTS: tl.constexpr = _outputs_apart(num_warps, BLOCK_N)
    WARPS: tl.constexpr = num_warps // OUTPUTS  # that divide the inputs
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, OUTPUTS, 1], [1, 16, 8])
    LEFT: tl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: tl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    WORDS: tl.constexpr = _words_layout(WARPS, OUTPUTS, BLOCK_N)
    VALUES: tl.constexpr = _values_layout(WARPS, OUTPUTS, ROWS)
    if EARLY == 0:
        await_previous(CHAINED, True)
    codes, scales = weight
    slots, block_experts, num_blocks = blocks
    num_tiles = gl.cdiv(size, BLOCK_N)
    block = gl.program_id(0) // num_tiles
    tile = gl.program_id(0) % num_tiles
    if ALONE:
        chosen = gl.load(slots + block) - first_id
        outside = (chosen < 0) | (chosen >= experts)
        if TOP_K > 0:  # what is multiplied then is not added up
            chosen = gl.where(outside, 0, chosen)
        elif outside:
            return
        expert = chosen.to(gl.int64)
    else:
        if block >= gl.load(num_blocks):
            return
        expert = gl.load(block_experts + block).to(gl.int64)
    # places of what a thread reads in the first step
    ROW: tl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, WORDS))
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
    ROW_X: tl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, VALUES)))
    THREAD_X: tl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, VALUES))))
    WORD_X: tl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, VALUES))))
    LANE_X: tl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, VALUES))))
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
    STEPS: tl.constexpr = (DEPTH + 128 * WARPS - 1) // (128 * WARPS)
    sums = gl.zeros([WARPS, BLOCK_N, ROWS], gl.float32, SUMS)
    ups = sums
    up_codes, up_scales = codes + size.to(gl.int64) * (DEPTH // 8), scales + size.to(gl.int64) * (DEPTH // 32)
    coming, coming_ups, rows_coming = (), (), ()
    BEFORE: tl.constexpr = EARLY if EARLY < STEPS else STEPS
    for step in gl.static_range(BEFORE):
        coming += (_read(codes, scales, words_at, scales_at, chunk, step, DEPTH, WARPS),)  # type: ignore[assignment]
    if EARLY > 0:
        await_previous(CHAINED, True)
    for step in gl.static_range(-AHEAD, STEPS):
        if step + AHEAD >= BEFORE and step + AHEAD < STEPS:
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
    TOTAL: tl.constexpr = gl.SliceLayout(0, SUMS)
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
    if TOP_K > 0:
        weights, sums, arrived = summing
        gl.store(sums + slot * size + column, total.to(sums.dtype.element_ty), mask=there & (slot < pairs))
        barrier()
        token = block // TOP_K
        counter = arrived + token * num_tiles + tile
        if gl.atomic_add(counter, 1, sem="acq_rel") == TOP_K - 1:
            _sum_up(total, slots, sums, weights, out, token, experts, first_id, size, column, place, TOP_K)
            gl.store(counter, 0)  # for the next launch
    else:
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
    out = torch.empty((ids.numel(), weight.codes.shape[1] // (2 if gated else 1)), dtype=x.dtype, device=x.device)
    _launch(x, weight, ids, held, blocks, tile, shared, gating, bias, out)
    return out


def summed(
    x: Tensor, weight: Any, weights: Tensor, ids: Tensor, held: range, tile: Tile, *, early: int = 0,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`product` of each pair by itself and `experts.combine` of them, [T, N], in one launch and with the same bits.

    So many first steps of the codes as `early` says are asked for while the kernel before this one ends. That must be
    one that has waited for what wrote `ids` before it let this one begin, as the first product does. Launches that
    share a device must follow one another.
    """
    tokens, size = len(ids), weight.codes.shape[1]
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    sums = torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device)
    summing = weights, sums, arrivals(x.device, tokens * triton.cdiv(size, tile.block_n))
    _launch(x, weight, ids, held, None, tile, 1, None, bias, out, summing, early)
    return out


def _launch(
    x: Tensor, weight: Any, ids: Tensor, held: range, blocks: Blocks | None, tile: Tile, shared: int,
    gating: Gating | None, bias: Tensor | None, out: Tensor, summing: tuple[Tensor, Tensor, Tensor] | None = None,
    early: int = 0,
) -> None:  # fmt: skip
    most, rows = (ids.numel(), 8) if blocks is None else blocks.slots.shape
    source = (ids, ids, ids) if blocks is None else (blocks.slots, blocks.experts, blocks.used)
    chain = chained(x.device) if blocks is None else {"CHAINED": False}
    _few_rows[(most * triton.cdiv(out.shape[1], tile.block_n),)](
        x, x.stride(0), (weight.codes, weight.scales), out if bias is None else bias, out, source,
        summing or (out, out, ids), ids.numel(), len(held), held.start, out.shape[1],
        DEPTH=weight.codes.shape[2] * 8, SHARED=shared, ALONE=blocks is None,
        GATED=gating is not None and gating.gated, ROWS=rows,
        BLOCK_N=tile.block_n, AHEAD=tile.block_k // WIDTH - 1, BIASED=bias is not None,
        TOP_K=0 if summing is None else ids.shape[1], EARLY=early,
        **constants(gating), **chain, num_warps=tile.num_warps,
        **({} if INTERPRETED else {"maxnreg": _registers(tile)}),
    )  # fmt: skip


def _registers(tile: Tile) -> int | None:
    """The most registers of a thread with which as many programs share a multiprocessor as the tile has stages."""
    return None if tile.num_stages == 1 else min(255, 65536 // (32 * tile.num_warps * tile.num_stages) // 8 * 8)


def fits(x: Tensor, weight: Any) -> bool:
    """Whether the kernel multiplies rows of x by a weight: 4-bit floats with an exponent for 32 of them, whole."""
    codes, scales = weight.codes, weight.scales
    known = weight.is_float4 and scales.dtype == torch.uint8 and weight.numbers is None and weight.columns is None
    whole = codes.shape[2] * 8 == GROUP * scales.shape[2] and scales.shape[1] == codes.shape[1]
    return known and whole and x.dtype == torch.bfloat16 and x.stride(0) % 8 == 0 and codes.shape[2] % 4 == 0
