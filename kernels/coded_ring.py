"""Products of one row with nibbles or 8-bit floats whose codes come through a ring of bulk copies, for Hopper.

What limits `frame.kernels.coded_fragments` with one row is that loads wait in registers: few bytes are on their way,
none while a program begins or ends. Here a program goes from tile to tile of 16 outputs, and the copies of its next
steps are always on their way, the first of them while the kernel before this one ends. Scales come with the codes,
since plain loads would wait behind all of them. The row is brought into float16 once for each program, divided by a
power of two, and in the order in which masks alone take nibbles out of a word: a nibble in the lowest bits of a float16
whose steps are 1 or 16 there is 1024 and itself, or 16 times itself, and a product of the row with what is too much is
added by the matrix unit. Codes are as in `frame.kernels.quantized`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .activation import silu_times
from .barriers import barrier as real_barrier
from .chain import await_previous, chained
from .coded_fragments import _nothing, _plain_float, _with
from .decode_narrow import _PAIRS, _halves
from .linear_invariant import num_multiprocessors
from .portable import INTERPRETED, gl, gluon, mma_v2

barrier = gl.barrier if INTERPRETED else real_barrier
_ASM = tl.constexpr(not INTERPRETED)
#: (weight, eps, offset) of `rms_norm`.
Norm = tuple[Tensor, float, float]
#: Outputs of a tile, warps of a program, and words of codes that a warp reads of each output in a step.
BLOCK_N, WARPS, WORDS = 16, 8, 32
#: Of eight nibbles of a word the pairs 0 and 4, 1 and 5, 2 and 6, 3 and 7, each as 1024 + n or 1024 + 16 n.
_NIBBLES = tl.constexpr("""{
.reg .b32 up;
shr.u32 up, $4, 8;
lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $1, $4, 0x00F000F0, 0x64006400, 0xEA;
lop3.b32 $2, up, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $3, up, 0x00F000F0, 0x64006400, 0xEA;
}""")


@dataclass(frozen=True)
class Ring:
    """Steps whose codes are on their way, and programs of a multiprocessor, which go from tile to tile."""

    stages: int
    programs: int


@gluon.jit
def _place(words, PLACE: tl.constexpr):
    """Nibbles `PLACE` and `PLACE` + 4 of words as `_NIBBLES` has them."""
    unit: tl.constexpr = 16.0 if PLACE % 2 else 1.0
    low, high = (words >> (4 * PLACE)) & 15, (words >> (4 * PLACE + 16)) & 15
    return gl.join(low.to(gl.float16) * unit + 1024.0, high.to(gl.float16) * unit + 1024.0).to(gl.float16)


@gluon.jit
def _weights(words, SUMS: tl.constexpr, NIBBLES: tl.constexpr):
    """The left operand [8, 16, columns] of words [8, 16, 16]."""
    if NIBBLES:
        if _ASM:
            a, b, c, d = gl.inline_asm_elementwise(
                _NIBBLES, "=&r,=&r,=&r,=&r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True, pack=1,
            )  # fmt: skip
            found = gl.join(gl.join(_halves(a), _halves(c)), gl.join(_halves(b), _halves(d)))
        else:
            found = gl.join(gl.join(_place(words, 0), _place(words, 2)), gl.join(_place(words, 1), _place(words, 3)))
        # [warp, output, thread, word, one of two, pair of four by its higher bit, by its lower bit]
        found = gl.reshape(found, (8, 16, 4, 4, 2, 2, 2))
        found = gl.reshape(gl.permute(found, (0, 1, 3, 5, 6, 2, 4)), (8, 16, 128))
    else:
        if _ASM:
            a, b = gl.inline_asm_elementwise(
                _PAIRS, "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
            )
            found = gl.join(_halves(a), _halves(b))
        else:
            found = gl.join(
                gl.join(_plain_float(words, 0, gl.float16), _plain_float(words, 1, gl.float16)),
                gl.join(_plain_float(words, 2, gl.float16), _plain_float(words, 3, gl.float16)),
            )
        found = gl.reshape(found, (8, 16, 4, 4, 2, 2))  # [warp, output, thread, word, one of two, pair]
        found = gl.reshape(gl.permute(found, (0, 1, 3, 5, 2, 4)), (8, 16, 64))
    return gl.convert_layout(found, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _right(values, like, SUMS: tl.constexpr, NIBBLES: tl.constexpr):
    """The right operand [8, columns, 8] of the row's numbers [8, columns, 1], in the order of `_weights`."""
    RIGHT: tl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    if NIBBLES:  # [warp, thread, word, pair by its higher bit, by its lower bit, one of two]
        found = gl.permute(gl.reshape(values, (8, 4, 4, 2, 2, 2, 1)), (0, 2, 3, 4, 1, 5, 6))
        found = gl.reshape(found, (8, 128, 1))
    else:
        found = gl.reshape(gl.permute(gl.reshape(values, (8, 4, 4, 2, 2, 1)), (0, 2, 3, 1, 4, 5)), (8, 64, 1))
    found, _ = gl.broadcast(gl.convert_layout(found, RIGHT, assert_trivial=True), like)
    return found


@gluon.jit
def _both(values, SIZE: tl.constexpr):
    """The two halves of what a warp has of a step, [8, .., 2 · SIZE] for words and [8, 2 · SIZE, 1] for the row."""
    if values.shape[2] == 1:
        apart = gl.permute(gl.reshape(values, (8, 2, SIZE, 1)), (0, 2, 3, 1))
    else:
        apart = gl.permute(gl.reshape(values, (8, 16, 2, SIZE)), (0, 1, 3, 2))
    return gl.split(apart)


@gluon.jit
def _begin(
    codes, scales, tiles, scale_tiles, ready, at, first, programs, outputs,
    STEPS: tl.constexpr, STAGES: tl.constexpr, COPIES: tl.constexpr, NIBBLES: tl.constexpr,
):  # fmt: skip
    """Begins the copies of the program's step `at`: of 16 outputs, or of 8 and as many factors."""
    stage, step = at % STAGES, at % STEPS
    output = (first + at // STEPS * programs) * (16 // COPIES)
    bar = ready.index(stage)
    mbarrier.expect(bar, 8 * 16 * 128 + (512 if NIBBLES else 0))
    for copy in gl.static_range(COPIES):
        own, place = output + copy * outputs, stage * COPIES + copy
        tma.async_copy_global_to_shared(codes, [step * 8, own, 0], bar, tiles.index(place))
        if NIBBLES:
            tma.async_copy_global_to_shared(scales, [own, step * 16], bar, scale_tiles.index(place))


@gluon.jit
def _row(x, norm, lane, dim, STEPS: tl.constexpr, WIDE: tl.constexpr, OFFSET: tl.constexpr):
    """The steps of the row that is multiplied, in float32: of x, or of the norm of x and a residual."""
    residual, gain, eps, offset, normed, total = norm
    found = _nothing()
    for step in gl.static_range(STEPS):
        values = gl.load(x + step * WIDE + lane)
        if residual is not None:
            values += gl.load(residual + step * WIDE + lane)
            if gl.program_id(0) == 0:
                gl.store(total + step * WIDE + lane, values)
        found = _with(found, values)
    rows = _nothing()
    if residual is None:
        for step in gl.static_range(STEPS):
            rows = _with(rows, found[step].to(gl.float32))
    else:
        squares = found[0].to(gl.float32) * found[0].to(gl.float32)
        for step in gl.static_range(1, STEPS):
            wide = found[step].to(gl.float32)
            squares += wide * wide
        size = gl.rsqrt(gl.sum(squares, 0) / dim + eps)
        for step in gl.static_range(STEPS):
            wide = found[step].to(gl.float32) * size
            own = gl.load(gain + step * WIDE + lane)
            if OFFSET:
                row = (wide * (own.to(gl.float32) + offset)).to(found[step].dtype)
            else:
                row = own * wide.to(found[step].dtype)
            if normed is not None:
                if gl.program_id(0) == 0:
                    gl.store(normed + step * WIDE + lane, row)
            rows = _with(rows, row.to(gl.float32))
    return rows


@gluon.jit
def _ring(
    x, norm, codes, code_source, scales, scale_source, bias, out, outputs, tiles_of_all, factor,
    NIBBLES: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, OFFSET: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr, HALF_WORDS: tl.constexpr, LINE: tl.constexpr,
    STEP: tl.constexpr, NUMBERS: tl.constexpr, HALF_NUMBERS: tl.constexpr, SUMS: tl.constexpr, GATE: tl.constexpr,
    CHAINED: tl.constexpr, num_warps: tl.constexpr,
):  # fmt: skip
    RIGHT: tl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    LEFT: tl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OUTPUTS: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SUMS))
    WIDE: tl.constexpr = 16 * COLUMNS  # columns of a step
    COPIES: tl.constexpr = 2 if GATED else 1
    EACH: tl.constexpr = 16 // COPIES
    first, programs = gl.program_id(0), gl.num_programs(0)
    steps_of_all = (tiles_of_all - first + programs - 1) // programs * STEPS
    if _ASM:
        tiles = gl.allocate_shared_memory(
            gl.int32, [STAGES * COPIES, 8, EACH, 32], gl.NVMMASharedLayout(128, 32, 3)
        )  # fmt: skip
        kind: tl.constexpr = scales.dtype.element_ty if NIBBLES else gl.float16
        scale_tiles = gl.allocate_shared_memory(kind, [STAGES * COPIES, EACH, 16], gl.NVMMASharedLayout(32, 16, 2))
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        rows = gl.allocate_shared_memory(
            gl.float16, [STEPS, 8, 2 * COLUMNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )  # fmt: skip
        for slot in gl.static_range(STAGES):
            mbarrier.init(ready.index(slot), count=1)
        fence_async_shared()
        for slot in gl.static_range(STAGES):
            if slot < steps_of_all:
                _begin(
                    code_source, scale_source, tiles, scale_tiles, ready, slot, first, programs, outputs,
                    STEPS, STAGES, COPIES, NIBBLES,
                )  # fmt: skip
    await_previous(CHAINED)

    # the row as float16, the largest of which becomes 2 ** 14 and some, so that sixteenths are exact, too
    lane = gl.arange(0, WIDE, LINE)
    found = _row(x, norm, lane, STEPS * WIDE, STEPS, WIDE, OFFSET)
    largest = gl.abs(found[0])
    for step in gl.static_range(1, STEPS):
        largest = gl.maximum(largest, gl.abs(found[step]))
    exponent = gl.max(largest, 0).to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(gl.maximum(exponent, 27), 254)
    small = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    unit = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    if NIBBLES:
        small = gl.where(lane % 2 == 1, small * 0.0625, small)
    kept = _nothing()
    for step in gl.static_range(STEPS):
        values = (found[step] * small).to(gl.float16)
        if NIBBLES:  # 0 and 4, 1 and 5, 2 and 6, 3 and 7
            values = gl.permute(gl.reshape(values, (WIDE // 8, 2, 4)), (0, 2, 1))
        values = gl.reshape(values, (8, 2 * COLUMNS, 1))
        if _ASM:
            rows.index(step).store(values)
        else:
            kept = _with(kept, values)
    barrier()

    like = gl.zeros([8, COLUMNS, 8], gl.float16, RIGHT)
    nothing = gl.zeros([8, 16, 8], gl.float32, SUMS)
    place = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))
    excess = gl.where(place // 8 % 2 == 1, -1152.0, -1032.0).to(gl.float16)[None, None, :]
    excess, _ = gl.broadcast(excess, gl.zeros([8, 16, COLUMNS], gl.float16, LEFT))
    at = first * 0
    for tile in range(first, tiles_of_all, programs):
        acc = nothing
        number = gl.arange(0, 16, OUTPUTS)
        there = tile * EACH + number % EACH < outputs
        output = tile * EACH + number % EACH + number // EACH * outputs  # factors are behind all others
        scale = factor
        if not NIBBLES:
            scale = gl.load(scales + output, mask=there, other=0.0).to(gl.float32) * unit
        for turn in range(STEPS):
            if _ASM:
                stage = at % STAGES
                mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
                part = rows.index(turn).load(STEP)
                if GATED:
                    words = gl.join(
                        tiles.index(stage * 2).load(HALF_WORDS), tiles.index(stage * 2 + 1).load(HALF_WORDS)
                    )
                    words = gl.reshape(gl.permute(words, (0, 3, 1, 2)), (8, 16, 32))
                else:
                    words = tiles.index(stage).load(WORDS)
            else:
                row = gl.arange(0, 16)
                row = tile * EACH + row % EACH + row // EACH * outputs
                real = (gl.arange(0, 16) % EACH + tile * EACH < outputs)[None, :]
                word = gl.arange(0, 8)[:, None, None] * 32 + gl.arange(0, 32)[None, None, :] + turn * 256
                words = gl.load(codes + row[None, :, None] * (STEPS * 256) + word, mask=real[:, :, None], other=0)
                part = kept[turn]
            halves, parts = _both(words, 16), _both(part, COLUMNS)
            if NIBBLES:
                if not _ASM:
                    chunk = gl.arange(0, 16)[:, None] + turn * 16
                    own = gl.load(scales + row[None, :] * (STEPS * 16) + chunk, mask=real, other=0.0)
                elif GATED:
                    own = gl.join(
                        scale_tiles.index(stage * 2).permute((1, 0)).load(HALF_NUMBERS),
                        scale_tiles.index(stage * 2 + 1).permute((1, 0)).load(HALF_NUMBERS),
                    )  # fmt: skip
                    own = gl.reshape(gl.permute(own, (0, 2, 1)), (16, 16))
                else:
                    own = scale_tiles.index(stage).permute((1, 0)).load(NUMBERS)
                owns = gl.split(gl.permute(gl.reshape(own, (8, 2, 16)), (0, 2, 1)))
            for half in gl.static_range(2):
                left = _weights(halves[half], SUMS, NIBBLES)
                right = _right(parts[half], like, SUMS, NIBBLES)
                if NIBBLES:
                    product = mma_v2(left, right, nothing) + mma_v2(excess, right, nothing)
                    scale_of = gl.convert_layout(owns[half], gl.SliceLayout(2, SUMS), assert_trivial=True)
                    acc += product * scale_of.to(gl.float32)[:, :, None]
                else:
                    acc = mma_v2(left, right, acc)
            barrier()  # all warps have read the tiles that the next copies overwrite
            if _ASM:
                if at + STAGES < steps_of_all:
                    _begin(
                        code_source, scale_source, tiles, scale_tiles, ready, at + STAGES, first, programs, outputs,
                        STEPS, STAGES, COPIES, NIBBLES,
                    )  # fmt: skip
            at += 1
        result = gl.sum(acc, 0)
        if NIBBLES:
            result *= unit
        else:
            result *= scale[:, None]
        if BIAS:
            result += gl.load(bias + output, mask=there, other=0.0).to(gl.float32)[:, None]
        dtype: tl.constexpr = out.dtype.element_ty
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(result, (2, 8, 8)), (1, 2, 0)))
            gated = silu_times(gl.convert_layout(gate, GATE), gl.convert_layout(up, GATE), dtype)
            column = gl.arange(0, 8, gl.SliceLayout(0, GATE))[None, :]
            place_of = tile * 8 + gl.arange(0, 8, gl.SliceLayout(1, GATE))[:, None]
            gl.store(out + place_of + column * 0, gated.to(dtype), mask=(place_of < outputs) & (column == 0))
        else:
            column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
            gl.store(out + output[:, None] + column * 0, result.to(dtype), mask=there[:, None] & (column == 0))


@lru_cache(maxsize=2)
def _layouts(columns: int) -> dict[str, object]:
    """How the threads of eight warps hold the words of a step, and the row."""
    of_thread = [[0, 1 << bit, 0] for bit in range((columns // 4).bit_length() - 1)]
    warps = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return {
        "WORDS": gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [0, 8, 0], [0, 0, 16]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
            warps, [], [8, 16, 32],
        ),
        "HALF_WORDS": gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [0, 0, 16]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]], warps, [],
            [8, 8, 32],
        ),
        "HALF_NUMBERS": gl.DistributedLinearLayout(
            [[1, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[2, 0], [4, 0], [8, 0]], [], [16, 8]
        ),
        "GATE": gl.BlockedLayout([1, 1], [8, 4], [8, 1], [1, 0]),
        "LINE": gl.BlockedLayout([columns // 16], [32], [8], [0]),
        "STEP": gl.DistributedLinearLayout(
            [*of_thread, [0, columns, 0]],
            [[0, columns // 4, 0], [0, columns // 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]], warps, [],
            [8, 2 * columns, 1],
        ),
        "NUMBERS": gl.DistributedLinearLayout(
            [[1, 0], [0, 8]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[2, 0], [4, 0], [8, 0]], [], [16, 16]
        ),
        "SUMS": gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]),
    }  # fmt: skip


def fits(codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None) -> bool:
    """Whether `product` takes the weight: nibbles with 16-bit scales of 128 columns, e4m3 with scales of rows."""
    nibbles = codes.dtype == torch.int32
    depth = codes.shape[-1] * (8 if nibbles else 1)
    whole = codes.is_contiguous() and scales.is_contiguous() and codes.data_ptr() % 16 == 0
    if nibbles:
        known = block == (1, 128) and zeros is None and scales.dtype.itemsize == 2 and scales.data_ptr() % 16 == 0
    else:
        known = codes.dtype == torch.float8_e4m3fn and block[0] == 1 and scales.shape[-1] == 1 and zeros is None
    columns = WARPS * WORDS * (8 if nibbles else 4)
    return whole and known and depth % columns == 0 and depth // columns <= 32


def product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, sizes: Ring, *, gated: bool = False
) -> Tensor:  # fmt: skip
    """x Wᵀ + b for one row x [1, K] of 16 bits and codes [N, K], or nibbles int32 [N, K / 8], that `fits`.

    With `gated`, the result is silu(a) · b of its halves a, b, each of them rounded first.
    """
    return _launch(x, (None, None, 0.0, 0.0, None, None), codes, scales, bias, sizes, gated)


def norm_product(
    x: Tensor, residual: Tensor, norm: Norm, codes: Tensor, scales: Tensor, bias: Tensor | None, sizes: Ring, *,
    gated: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(`product` of normed, normed unless `gated`, x + residual), where normed is `add_rms_norm` of the two."""
    gain, eps, offset = norm
    normed, total = None if gated else torch.empty_like(x), torch.empty_like(x)
    given = residual, gain, float(eps), float(offset), normed, total
    return _launch(x, given, codes, scales, bias, sizes, gated), normed, total


def _launch(
    x: Tensor, norm: tuple[Any, ...], codes: Tensor, scales: Tensor, bias: Tensor | None, sizes: Ring, gated: bool
) -> Tensor:
    rows, nibbles, copies = len(codes), codes.dtype == torch.int32, 2 if gated else 1
    outputs, each = rows // copies, BLOCK_N // copies
    words = codes.view(torch.int32)
    steps = words.shape[-1] // (WARPS * WORDS)
    columns = WORDS // 2 * (8 if nibbles else 4)
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(outputs, each)
    programs = min(tiles, sizes.programs * num_multiprocessors(x.device))
    sources: list[Any] = [None, None]
    if not INTERPRETED:
        parts = words.as_strided((words.shape[1] // 32, rows, 32), (32, words.stride(0), 1))
        kind = gl.NVMMASharedLayout(128, 32, 3)
        sources[0] = TensorDescriptor(parts, list(parts.shape), list(parts.stride()), [8, each, 32], kind)
        if nibbles:
            kind = gl.NVMMASharedLayout(32, 16, 2)
            sources[1] = TensorDescriptor(scales, list(scales.shape), list(scales.stride()), [each, 16], kind)
    _ring[(programs,)](
        x, norm, words, sources[0], scales, sources[1], bias, out, outputs, tiles, 1.0,
        NIBBLES=nibbles, BIAS=bias is not None, GATED=gated, OFFSET=norm[3] != 0.0, STEPS=steps, STAGES=sizes.stages,
        COLUMNS=columns, num_warps=WARPS, **_layouts(columns), **chained(x.device),
    )  # fmt: skip
    return out
