"""Products of 9 to 64 rows with nibbles or 8-bit floats by matrix instructions of four warps, for Hopper.

The weight is their left operand, in registers, as in `frame.kernels.coded_fragments`; the rows of x come from shared
memory, so that the warps of a program read them once. There inputs lie in the order in which threads hold codes.
Where outputs alone make too few programs, several divide the inputs, and the last to end adds their sums up, always in
the same order. Codes are as in `frame.kernels.quantized`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .barriers import barrier as real_barrier
from .chain import await_previous, chained
from .coded_fragments import _fetch, _floats, _nibbles, _nothing, _with, width
from .coded_rows import arrivals
from .portable import INTERPRETED, gl, gluon, hopper

barrier = gl.barrier if INTERPRETED else real_barrier
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
fence_async_shared = hopper.fence_async_shared


@gluon.jit
def _reordered(values, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):
    """Columns of x in the order in which matrix instructions meet the codes that threads hold."""
    apart = gl.reshape(values, (BLOCK_M, 4, CHUNK // 32, 2, 2, 2))
    return gl.reshape(gl.permute(apart, (0, 2, 3, 4, 1, 5)), (BLOCK_M, CHUNK))


@gluon.jit
def _rows_at(x_source, kept, EVEN: tl.constexpr):
    if EVEN:
        found = gl.load(x_source)
    else:
        found = gl.load(x_source, mask=kept, other=0.0)
    return found


@gluon.jit(do_not_specialize=["rows"])
def _warpgroups(
    x, codes, scales, zeros, bias, out, sums, arrived, rows, outputs, words, chunks, groups, stride_x, per, splits,
    GROUP: tl.constexpr, ROWS_PER: tl.constexpr, NIBBLES: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
    RING: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr,
    CHAINED: tl.constexpr, num_warps: tl.constexpr,
):  # fmt: skip
    # GROUP 0: one scale for all columns, which multiplies the sum. A chunk is what a step multiplies
    LEFT: tl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    EACH: tl.constexpr = WIDE * (8 if NIBBLES else 4)  # columns of a thread
    CHUNK: tl.constexpr = 4 * EACH
    dtype: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = 0x43004300 if dtype == gl.bfloat16 else 0x64006400
    # chunks that have one scale are added up before it multiplies them
    PER: tl.constexpr = GROUP // CHUNK if GROUP else RING
    JOINED: tl.constexpr = PER if RING % PER == 0 else 1
    tile, split = gl.program_id(0), gl.program_id(1)
    begin = split * per
    end = gl.minimum(begin + per, chunks)

    output = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    output = gl.minimum(output, outputs - 1)
    part = gl.arange(0, 1, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None]
    word = gl.arange(0, 4 * WIDE, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    source = codes + (output.to(gl.int64) * words)[None, :, None] + part[:, :, None] + word + begin * (4 * WIDE)
    zero_row = (output // ROWS_PER * groups)[None, :]

    column = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    there = column < outputs
    column = gl.minimum(column, outputs - 1)
    scale_row = column // ROWS_PER * groups

    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS))[:, None]
    lane = gl.arange(0, CHUNK, gl.SliceLayout(0, ROWS))[None, :]
    x_source = x + gl.minimum(row, rows - 1).to(gl.int64) * stride_x + lane + begin * CHUNK
    tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_M, CHUNK], gl.NVMMASharedLayout(min(128, 2 * CHUNK), 16, 2))

    ring = _nothing()
    for slot in gl.static_range(RING):
        fetched = _fetch(
            source + slot * (4 * WIDE), scales, zeros, scale_row, zero_row, begin + slot + part,
            begin + slot + scale_row * 0, end, GROUP, CHUNK, ZEROS, NIBBLES,
        )  # fmt: skip
        ring = _with(ring, fetched)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    await_previous(CHAINED)
    tiles.index(0).store(_reordered(_rows_at(x_source, begin + row * 0 < end, EVEN), BLOCK_M, CHUNK))
    fence_async_shared()
    barrier()
    at = begin * 0
    for first in range(begin, end, RING):
        source += RING * 4 * WIDE
        following = _nothing()
        for slot in gl.static_range(RING):
            found, scale, zero = ring[slot]
            x_source += CHUNK
            ahead = _rows_at(x_source, first + slot + 1 + row * 0 < end, False)
            if NIBBLES:
                eights = gl.convert_layout(found, WORDS, assert_trivial=True)
                own_zero = gl.full_like(eights, BITS + 0x00080008)
                if ZEROS:
                    own_zero = (zero.to(gl.int32) * 0x00010001 + BITS)[:, :, None]
                weight = _nibbles(eights, own_zero, dtype)
            else:
                weight = _floats(found, dtype)
            weight = gl.permute(gl.reshape(weight, (BLOCK_N, 4, CHUNK // 32, 2, 2, 2)), (0, 2, 3, 4, 1, 5))
            left = gl.convert_layout(gl.reshape(weight, (BLOCK_N, CHUNK)), LEFT, assert_trivial=True)
            right = tiles.index(at).permute((1, 0))
            if slot % JOINED == 0:
                empty = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
                product = warpgroup_mma(left, right, empty, use_acc=False, is_async=True)
            else:
                product = warpgroup_mma(left, right, product, is_async=True)
            later = first + RING + slot
            fetched = _fetch(
                source + slot * (4 * WIDE), scales, zeros, scale_row, zero_row, later + part, later + scale_row * 0,
                end, GROUP, CHUNK, ZEROS, NIBBLES,
            )  # fmt: skip
            following = _with(following, fetched)
            at = 1 - at
            tiles.index(at).store(_reordered(ahead, BLOCK_M, CHUNK))
            product = warpgroup_mma_wait(0, deps=[product])
            fence_async_shared()
            if slot % JOINED == JOINED - 1:
                if GROUP:
                    acc += product * scale.to(gl.float32)[:, None]
                else:
                    acc += product
            barrier()
        ring = following
    own_row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS))[None, :]
    place = own_row * outputs + column[:, None]
    inside = (own_row < rows) & there[:, None]
    last = True
    if SPLIT:
        line = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))[:, None]
        inner = line * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS))[None, :]
        sums += tile * splits * (BLOCK_N * BLOCK_M)
        gl.store(sums + split * (BLOCK_N * BLOCK_M) + inner, acc)
        barrier()
        last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
            for _ in range(splits):
                acc += gl.load(sums + inner, cache_modifier=".cg")
                sums += BLOCK_N * BLOCK_M
            gl.store(arrived + tile, 0)
    if last:
        if not GROUP:
            acc *= gl.load(scales + scale_row).to(gl.float32)[:, None]
        if BIAS:
            acc += gl.load(bias + column).to(gl.float32)[:, None]
        gl.store(out + place, acc.to(dtype), mask=inside)


@dataclass(frozen=True)
class Warpgroups:
    """Sizes of a program.

    They are warps, each of 16 outputs, programs that divide the inputs, chunks on their way, the most words of codes
    that a thread loads at once, and the most registers of a thread; 0: as many as the compiler wants.
    """

    warps: int
    splits: int
    ring: int
    wide: int = 4
    registers: int = 0


def _bits(count: int) -> int:
    return count.bit_length() - 1


@lru_cache(maxsize=256)
def _layouts(warps: int, wide: int, chunk: int, block_m: int) -> dict[str, object]:
    """How threads hold the words of codes, the sums, and the rows of x."""
    eight = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    across = [[0, 16 << bit, 0] for bit in range(_bits(warps))]
    words = gl.DistributedLinearLayout(
        [[0, 0, 1 << bit] for bit in range(_bits(wide))] + [[0, 8, 0]],
        [[0, 0, wide], [0, 0, 2 * wide], *eight], across, [], [1, 16 * warps, 4 * wide],
    )  # fmt: skip
    sums = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_m, 16])
    threads = chunk // 8
    rows = gl.BlockedLayout([1, 8], [32 // threads, threads], [warps, 1], [1, 0])
    return {"WORDS": words, "WORD": words, "SUMS": sums, "ROWS": rows}


def product(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None,
    sizes: Warpgroups,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b for x [rows, K] of 16 bits, and codes as `coded_fragments.fits` takes them; one launch."""
    rows, outputs, groups = len(x), len(codes), scales.shape[-1]
    nibbles = codes.dtype == torch.int32
    depth = codes.shape[-1] * (8 if nibbles else 1)
    wide = min(sizes.wide, width(depth, block[1] if groups > 1 else depth, nibbles=nibbles))
    chunk = 4 * wide * (8 if nibbles else 4)
    chunks, block_m = depth // chunk, max(16, 1 << (rows - 1).bit_length())
    per = triton.cdiv(triton.cdiv(chunks, min(sizes.splits, chunks)), sizes.ring) * sizes.ring
    splits, tiles = triton.cdiv(chunks, per), triton.cdiv(outputs, 16 * sizes.warps)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    room = tiles * splits * 16 * sizes.warps * block_m
    sums = torch.empty(room, dtype=torch.float32, device=x.device) if splits > 1 else out
    words = codes.view(torch.int32)
    limited = {"maxnreg": sizes.registers} if sizes.registers and not INTERPRETED else {}
    _warpgroups[(tiles, splits)](
        x, words, scales, zeros, bias, out, sums, arrivals(x.device, tiles), rows, outputs, words.shape[-1], chunks,
        groups, x.stride(0), per, splits,
        GROUP=block[1] if groups > 1 else 0, ROWS_PER=block[0], NIBBLES=nibbles, ZEROS=zeros is not None,
        BIAS=bias is not None, EVEN=True, SPLIT=splits > 1, BLOCK_M=block_m, BLOCK_N=16 * sizes.warps, WIDE=wide,
        RING=sizes.ring, num_warps=sizes.warps, **_layouts(sizes.warps, wide, chunk, block_m), **chained(x.device),
        **limited,
    )  # fmt: skip
    return out
