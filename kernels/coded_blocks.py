"""Products of blocks of 16 to 128 pairs with experts whose weights are 4-bit floats, for Hopper, in Gluon; for
`coded_experts`, whose plain kernel is the twin that other chips run.

Matrix instructions of four warps multiply: the weights are their left operand, in registers, as a thread decodes them
of 16 bytes of a row of codes. The right one, the block's rows of x, comes from shared memory, for which
`ordered` copies x in the order of inputs in which threads hold weights, so that rows are gathered as they are. A
program multiplies two matrices by the same rows: gate and up of its outputs, or two tiles of them. One is decoded while
the product of the other runs. Blocks of few pairs have a path of their own, which multiplies 16 rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .barriers import barrier as real_barrier
from .coded_few import _LATE, WIDTH, _pair, fits
from .coded_fragments import _nothing, _with
from .expert_launch import Tile
from .expert_tiles import place
from .gating import Gating, constants, gate_alone, gate_times
from .portable import INTERPRETED, async_copy, gl, gluon, hopper
from .routing import Blocks

__all__ = ["fits", "ordered", "product"]

barrier = gl.barrier if INTERPRETED else real_barrier
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
warpgroup_mma_init = hopper.warpgroup_mma_init
fence_async_shared = hopper.fence_async_shared
#: Rows that are multiplied where a block has no more pairs.
SHORT = 16
_BLOCK = 1024  # numbers that a program of `_ordered` copies


@triton.jit
def _ordered(x, out, depth, width, stride_x, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = at % 128
    # of a number's place in the order: word, which pair of codes of it, thread, half; of its column: thread first
    column = at - inner + inner // 2 % 4 * 32 + inner // 32 * 8 + inner % 2 * 4 + inner // 16 % 2 * 2 + inner // 8 % 2
    value = tl.load(x + row * stride_x + column, mask=column < depth, other=0.0)
    tl.store(out + row * width + at, value, mask=at < width)


@gluon.jit
def _left(words, scale, OPERAND: tl.constexpr, BLOCK_N: tl.constexpr):
    """bfloat16 [BLOCK_N, 128] of words [BLOCK_N, 4, 4] and scales [BLOCK_N, 4]."""
    factor = ((scale.to(gl.int32) + 94) * 0x00800080).expand_dims(2)
    even = gl.join(_pair(words, factor, 0), _pair(words, factor, 1))
    odd = gl.join(_pair(words, factor, 2), _pair(words, factor, 3))
    every = gl.join(even, odd)  # output, thread, word, half, place % 2, place // 2
    every = every.permute((0, 2, 5, 4, 1, 3)).reshape((BLOCK_N, 128))
    return gl.convert_layout(every, OPERAND, assert_trivial=True)


@gluon.jit
def _read(codes, scales, words_at, scales_at, chunk, step, DEPTH: tl.constexpr):
    """Words and scales of a step; words behind the last multiply zeros, and are what they are."""
    kept = step * 4 + chunk < DEPTH // 32
    words = gl.load(codes + words_at + step * 16, mask=kept.expand_dims(2))
    scale = gl.load(scales + scales_at + step * 4, mask=kept, other=0)
    return words, scale


@gluon.jit
def _finish(
    acc, bias, out, slot, pairs, first, size, BIASED: tl.constexpr, FUNCTION: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Stores sums [BLOCK_N, slots] of outputs from `first` on, with their biases and through what is no gate."""
    if BIASED:
        acc = _biased(acc, bias, first, size, BLOCK_N, SUMS)
    if FUNCTION != "":
        acc = gate_alone(acc, FUNCTION, ALPHA, LIMIT)
    result = gl.convert_layout(acc.to(out.dtype.element_ty), LINES)
    column = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINES))
    inside = (column < size)[:, None] & (slot < pairs)[None, :]
    gl.store(out + slot.to(gl.int64)[None, :] * size + column[:, None], result, mask=inside)


@gluon.jit
def _biased(acc, bias, first, size, BLOCK_N: tl.constexpr, SUMS: tl.constexpr):
    column = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    return acc + gl.load(bias + column, mask=column < size, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _multiply(
    x, stride_x, codes, scales, bias, out, slots, pairs, first, other, size,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, RING: tl.constexpr, STAGES: tl.constexpr, BIASED: tl.constexpr, FUNCTION: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr, WORDS: tl.constexpr, SUMS: tl.constexpr,
    GATHERED: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The first ROWS pairs of a block, and outputs from `first` on: of an expert's matrices, `other` rows apart."""
    LEFT: tl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    row = gl.load(slots + gl.arange(0, ROWS, gl.SliceLayout(1, GATHERED)))
    some = gl.load(slots)
    row = gl.where(row < pairs, row, some) // SHARED  # padding reads the block's first row
    x_at = x + row.to(gl.int64)[:, None] * stride_x + gl.arange(0, 128, gl.SliceLayout(0, GATHERED))[None, :]
    tiles = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, ROWS, 128], gl.NVMMASharedLayout(128, 16, 2))

    output = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None]
    chunk = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    line = gl.minimum(output, size - 1)
    words_at = (line * (DEPTH // 8) + chunk * 4).expand_dims(2) + word
    scales_at = line * (DEPTH // 32) + chunk
    line = gl.minimum(output, size - 1) + other
    if not GATED:
        line = gl.minimum(output + other, size - 1)
    other_words_at = (line * (DEPTH // 8) + chunk * 4).expand_dims(2) + word
    other_scales_at = line * (DEPTH // 32) + chunk

    ring = _nothing()
    for slot in gl.static_range(RING):
        one = _read(codes, scales, words_at, scales_at, chunk, slot, DEPTH)
        two = _read(codes, scales, other_words_at, other_scales_at, chunk, slot, DEPTH)
        ring = _with(ring, (one, two))
    for stage in gl.static_range(STAGES - 2):
        async_copy.async_copy_global_to_shared(tiles.index(stage), x_at + stage * 128)
        async_copy.commit_group()
    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, SUMS)
    acc_other = warpgroup_mma_init(acc)
    for begin in range(0, STEPS, RING):
        following = _nothing()
        for slot in gl.static_range(RING):
            step = begin + slot
            found, found_other = ring[slot]
            left = _left(found[0], found[1], LEFT, BLOCK_N)
            one = _read(codes, scales, words_at, scales_at, chunk, step + RING, DEPTH)
            async_copy.wait_group(STAGES - 3)
            barrier()  # all warps have multiplied the rows of the step before the last one
            ahead = step + (STAGES - 2)
            kept = (row * 0 + ahead < STEPS)[:, None]
            async_copy.async_copy_global_to_shared(tiles.index(ahead % STAGES), x_at + ahead * 128, mask=kept)
            async_copy.commit_group()
            fence_async_shared()
            barrier()
            right = tiles.index(step % STAGES).permute((1, 0))
            begun = warpgroup_mma(left, right, acc, is_async=True)
            acc_other = warpgroup_mma_wait(1, deps=[acc_other])
            left = _left(found_other[0], found_other[1], LEFT, BLOCK_N)
            two = _read(codes, scales, other_words_at, other_scales_at, chunk, step + RING, DEPTH)
            acc_other = warpgroup_mma(left, right, acc_other, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[begun])
            following = _with(following, (one, two))
        ring = following
    acc_other = warpgroup_mma_wait(0, deps=[acc_other])
    acc, acc_other = acc * _LATE, acc_other * _LATE
    slot = gl.load(slots + gl.arange(0, ROWS, gl.SliceLayout(0, LINES)))
    if GATED:
        if BIASED:
            acc = _biased(acc, bias, first, size, BLOCK_N, SUMS)
            acc_other = _biased(acc_other, bias + size, first, size, BLOCK_N, SUMS)
        acc = gate_times(acc, acc_other, FUNCTION, ALPHA, SHIFT, LIMIT)
        _finish(acc, bias, out, slot, pairs, first, size, False, "", ALPHA, LIMIT, BLOCK_N, LINES, SUMS)
    else:
        _finish(acc, bias, out, slot, pairs, first, size, BIASED, FUNCTION, ALPHA, LIMIT, BLOCK_N, LINES, SUMS)
        _finish(
            acc_other, bias, out, slot, pairs, first + BLOCK_N, size,
            BIASED, FUNCTION, ALPHA, LIMIT, BLOCK_N, LINES, SUMS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["pairs"])
def _block_rows(
    x, stride_x, weight, bias, out, blocks, pairs, size,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    LEAST: tl.constexpr, BLOCK_N: tl.constexpr, RING: tl.constexpr, STAGES: tl.constexpr, BIASED: tl.constexpr,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr, WORDS: tl.constexpr,
    SUMS: tl.constexpr, FEW_SUMS: tl.constexpr, GATHERED: tl.constexpr, LINES: tl.constexpr, num_warps: tl.constexpr,
):  # fmt: skip
    """One program: the pairs of a block of one expert, and BLOCK_N outputs, or without a gate twice as many."""
    codes, scales = weight
    slots, block_experts, num_blocks = blocks
    OUTPUTS: tl.constexpr = BLOCK_N if GATED else 2 * BLOCK_N
    num_tiles = gl.cdiv(size, OUTPUTS)
    total = gl.load(num_blocks)
    if gl.program_id(0) >= total * num_tiles:
        return
    block, tile = place(gl.program_id(0), total, num_tiles)
    start = gl.load(block_experts + block).to(gl.int64) * (2 if GATED else 1) * size
    codes += start * (DEPTH // 8)
    scales += start * (DEPTH // 32)
    slots += block * ROWS
    other = size if GATED else BLOCK_N
    few = ROWS < 0
    if LEAST < ROWS:
        few = gl.load(slots + LEAST) >= pairs
    if few:
        if LEAST < ROWS:
            _multiply(
                x, stride_x, codes, scales, bias + start, out, slots, pairs, tile * OUTPUTS, other, size,
                DEPTH, STEPS, SHARED, GATED, LEAST, BLOCK_N, RING, STAGES, BIASED, FUNCTION, ALPHA, SHIFT, LIMIT,
                WORDS, FEW_SUMS, GATHERED, LINES,
            )  # fmt: skip
    else:
        _multiply(
            x, stride_x, codes, scales, bias + start, out, slots, pairs, tile * OUTPUTS, other, size,
            DEPTH, STEPS, SHARED, GATED, ROWS, BLOCK_N, RING, STAGES, BIASED, FUNCTION, ALPHA, SHIFT, LIMIT,
            WORDS, SUMS, GATHERED, LINES,
        )  # fmt: skip


def _powers(count: int, unit: int) -> list[int]:
    return [unit << bit for bit in range(count.bit_length() - 1)]


@lru_cache(maxsize=64)
def _layouts(warps: int, rows: int, least: int) -> dict[str, object]:
    """How threads hold the words of codes, the sums, rows of x that they copy, and results that they store."""
    words = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[at, 0, 0] for at in _powers(warps, 16)], [], [16 * warps, 4, 4],
    )  # fmt: skip
    sums, few_sums = (gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, count, 16]) for count in (rows, least))
    return {
        "WORDS": words, "SUMS": sums, "FEW_SUMS": few_sums,
        "GATHERED": gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0]),
        "LINES": gl.BlockedLayout([8, 1], [8, 4], [1, warps], [0, 1]),
    }  # fmt: skip


def ordered(x: Tensor, width: int) -> Tensor:
    """[rows, `width`] of x [rows, K], its columns contiguous, with zeros behind K.

    Each 128 columns lie in the order in which matrix instructions meet the codes of a thread's 32.
    """
    rows, depth = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _ordered[(rows, triton.cdiv(width, _BLOCK))](x, out, depth, width, x.stride(0), BLOCK=_BLOCK, num_warps=4)
    return out


def product(
    x: Tensor, weight: Any, ids: Tensor, held: range, blocks: Blocks | None, tile: Tile, *, shared: int = 1,
    gating: Gating | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `coded_experts.coded_product`, of bfloat16 rows, a weight that `fits` takes, and blocks of 16 to 128 pairs.

    A warp has 16 outputs of a tile, 32 without a gate: other tiles, and no blocks, are a `ValueError`.
    `tile.block_k` are the inputs whose codes are on their way, a multiple of 128, and `num_stages` the steps of 128
    inputs that there is room for of x.
    """
    gated = gating is not None and gating.gated
    if blocks is None:
        raise ValueError("it multiplies blocks of pairs, and there are no blocks")
    if tile.block_n != tile.num_warps * (16 if gated else 32):
        raise ValueError(f"{tile} does not have 16 outputs a warp and matrix")
    size, depth = weight.codes.shape[1] // (2 if gated else 1), weight.codes.shape[2] * 8
    most, rows = blocks.slots.shape
    ring, least = tile.block_k // WIDTH, min(rows, SHORT)
    steps = triton.cdiv(depth, ring * WIDTH) * ring
    x = ordered(x, steps * WIDTH)
    out = torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device)
    _block_rows[(most * triton.cdiv(size, tile.block_n),)](
        x, x.stride(0), (weight.codes, weight.scales), out if bias is None else bias, out,
        (blocks.slots, blocks.experts, blocks.used), ids.numel(), size,
        DEPTH=depth, STEPS=steps, SHARED=shared, GATED=gated, ROWS=rows, LEAST=least, BLOCK_N=16 * tile.num_warps,
        RING=ring, STAGES=tile.num_stages, BIASED=bias is not None, **constants(gating), num_warps=tile.num_warps,
        **_layouts(tile.num_warps, rows, least),
    )  # fmt: skip
    return out
