"""Products of one row with 8-bit floats whose codes come through a ring of bulk copies, for Hopper.

What limits `frame.kernels.coded_fragments` with one row is that loads wait in registers: few bytes are on their way,
none while a program begins or ends. Here a program goes from tile to tile of 16 outputs, and the copies of its next
steps are always on their way, the first of them while the kernel before this one ends. The row is brought into float16
once for each program, divided by a power of two; the chip converts pairs of e4m3 to float16, which holds them exactly.
Codes are as in `frame.kernels.quantized`. Nibbles have no such kernel: it took 1.3 times as long as fragments for the
largest product of a layer, since most of its instructions take nibbles out of words, and gained 1 us in one of four.
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

from .barriers import barrier as real_barrier
from .chain import await_previous, chained
from .coded_fragments import _nothing, _plain_float, _with
from .decode_narrow import _PAIRS, _halves
from .linear_invariant import num_multiprocessors
from .portable import INTERPRETED, gl, gluon, mma_v2

barrier = gl.barrier if INTERPRETED else real_barrier
_ASM = tl.constexpr(not INTERPRETED)
#: Outputs of a tile, warps of a program, words of codes that a warp reads of each output in a step, columns of half of
#: them, and the most steps of a tile.
BLOCK_N, WARPS, WORDS, COLUMNS, MOST_STEPS = 16, 8, 32, 64, 32


@dataclass(frozen=True)
class Ring:
    """Steps whose codes are on their way, and programs of a multiprocessor, which go from tile to tile."""

    stages: int
    programs: int


@gluon.jit
def _weights(words, SUMS: tl.constexpr):
    """The left operand [8, 16, 64] of words [8, 16, 16]."""
    if _ASM:
        a, b = gl.inline_asm_elementwise(
            _PAIRS, "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )  # fmt: skip
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
def _right(values, like, SUMS: tl.constexpr):
    """The right operand [8, 64, 8] of the row's numbers [8, 64, 1], in the order of `_weights`."""
    RIGHT: tl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    found = gl.reshape(gl.permute(gl.reshape(values, (8, 4, 4, 2, 2, 1)), (0, 2, 3, 1, 4, 5)), (8, 64, 1))
    found, _ = gl.broadcast(gl.convert_layout(found, RIGHT, assert_trivial=True), like)
    return found


@gluon.jit
def _both(values, SIZE: tl.constexpr):
    """The two halves of what a warp has of a step, [8, 16, 2 · SIZE] for words and [8, 2 · SIZE, 1] for the row."""
    if values.shape[2] == 1:
        apart = gl.permute(gl.reshape(values, (8, 2, SIZE, 1)), (0, 2, 3, 1))
    else:
        apart = gl.permute(gl.reshape(values, (8, 16, 2, SIZE)), (0, 1, 3, 2))
    return gl.split(apart)


@gluon.jit
def _begin(codes, tiles, ready, at, first, programs, STEPS: tl.constexpr, STAGES: tl.constexpr):
    """Begins the copy of the program's step `at`, of 16 outputs."""
    stage, step = at % STAGES, at % STEPS
    bar = ready.index(stage)
    mbarrier.expect(bar, 8 * 16 * 128)
    output = (first + at // STEPS * programs) * 16
    tma.async_copy_global_to_shared(codes, [step * 8, output, 0], bar, tiles.index(stage))


@gluon.jit
def _ring(
    x, codes, code_source, scales, bias, out, outputs, tiles_of_all,
    BIAS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
    LINE: tl.constexpr, STEP: tl.constexpr, SUMS: tl.constexpr, CHAINED: tl.constexpr, num_warps: tl.constexpr,
):  # fmt: skip
    RIGHT: tl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    OUTPUTS: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SUMS))
    WIDE: tl.constexpr = 16 * COLUMNS  # columns of a step
    first, programs = gl.program_id(0), gl.num_programs(0)
    steps_of_all = (tiles_of_all - first + programs - 1) // programs * STEPS
    if _ASM:
        tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 8, 16, 32], gl.NVMMASharedLayout(128, 32, 3))
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        rows = gl.allocate_shared_memory(
            gl.float16, [STEPS, 8, 2 * COLUMNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )  # fmt: skip
        for slot in gl.static_range(STAGES):
            mbarrier.init(ready.index(slot), count=1)
        fence_async_shared()
        for slot in gl.static_range(STAGES):
            if slot < steps_of_all:
                _begin(code_source, tiles, ready, slot, first, programs, STEPS, STAGES)
    await_previous(CHAINED)

    # the row as float16, the largest of which becomes 2 ** 14 and some
    lane = gl.arange(0, WIDE, LINE)
    found = _nothing()
    for step in gl.static_range(STEPS):
        found = _with(found, gl.load(x + step * WIDE + lane).to(gl.float32))
    largest = gl.abs(found[0])
    for step in gl.static_range(1, STEPS):
        largest = gl.maximum(largest, gl.abs(found[step]))
    exponent = gl.max(largest, 0).to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(gl.maximum(exponent, 27), 254)
    small = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    unit = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    kept = _nothing()
    for step in gl.static_range(STEPS):
        values = gl.reshape((found[step] * small).to(gl.float16), (8, 2 * COLUMNS, 1))
        if _ASM:
            rows.index(step).store(values)
        else:
            kept = _with(kept, values)
    barrier()

    like = gl.zeros([8, COLUMNS, 8], gl.float16, RIGHT)
    at = first * 0
    for tile in range(first, tiles_of_all, programs):
        acc = gl.zeros([8, 16, 8], gl.float32, SUMS)
        output = tile * 16 + gl.arange(0, 16, OUTPUTS)
        there = output < outputs
        scale = gl.load(scales + output, mask=there, other=0.0).to(gl.float32) * unit
        for turn in range(STEPS):
            if _ASM:
                stage = at % STAGES
                mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
                part = rows.index(turn).load(STEP)
                words = tiles.index(stage).load(WORDS)
            else:
                row = tile * 16 + gl.arange(0, 16)
                word = gl.arange(0, 8)[:, None, None] * 32 + gl.arange(0, 32)[None, None, :] + turn * 256
                place = codes + row[None, :, None] * (STEPS * 256) + word
                words = gl.load(place, mask=(row < outputs)[None, :, None], other=0)
                part = kept[turn]
            halves, parts = _both(words, 16), _both(part, COLUMNS)
            for half in gl.static_range(2):
                acc = mma_v2(_weights(halves[half], SUMS), _right(parts[half], like, SUMS), acc)
            barrier()  # all warps have read the tiles that the next copies overwrite
            if _ASM:
                if at + STAGES < steps_of_all:
                    _begin(code_source, tiles, ready, at + STAGES, first, programs, STEPS, STAGES)
            at += 1
        result = gl.sum(acc, 0) * scale[:, None]
        if BIAS:
            result += gl.load(bias + output, mask=there, other=0.0).to(gl.float32)[:, None]
        column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
        gl.store(
            out + output[:, None] + column * 0, result.to(out.dtype.element_ty), mask=there[:, None] & (column == 0)
        )  # fmt: skip


@lru_cache(maxsize=1)
def _layouts() -> dict[str, object]:
    """How the threads of eight warps hold the words of a step, and the row."""
    of_thread = [[0, 1 << bit, 0] for bit in range((COLUMNS // 4).bit_length() - 1)]
    warps = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return {
        "WORDS": gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [0, 8, 0], [0, 0, 16]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
            warps, [], [8, 16, 32],
        ),
        "LINE": gl.BlockedLayout([COLUMNS // 16], [32], [8], [0]),
        "STEP": gl.DistributedLinearLayout(
            [*of_thread, [0, COLUMNS, 0]],
            [[0, COLUMNS // 4, 0], [0, COLUMNS // 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]], warps, [],
            [8, 2 * COLUMNS, 1],
        ),
        "SUMS": gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]),
    }  # fmt: skip


def fits(codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None) -> bool:
    """Whether `product` takes the weight: e4m3 with a scale for each row."""
    columns = WARPS * WORDS * 4
    return (
        codes.dtype == torch.float8_e4m3fn
        and codes.is_contiguous()
        and codes.data_ptr() % 16 == 0
        and codes.shape[-1] % columns == 0
        and codes.shape[-1] // columns <= MOST_STEPS
        and scales.is_contiguous()
        and scales.shape[-1] == 1
        and block[0] == 1
        and zeros is None
    )


def product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, sizes: Ring) -> Tensor:
    """x Wᵀ + b for one row x [1, K] of 16 bits and codes [N, K] that `fits`."""
    outputs, words = len(codes), codes.view(torch.int32)
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(outputs, BLOCK_N)
    programs = min(tiles, sizes.programs * num_multiprocessors(x.device))
    source: Any = None
    if not INTERPRETED:
        parts = words.as_strided((words.shape[1] // 32, outputs, 32), (32, words.stride(0), 1))
        kind = gl.NVMMASharedLayout(128, 32, 3)
        source = TensorDescriptor(parts, list(parts.shape), list(parts.stride()), [8, BLOCK_N, 32], kind)
    _ring[(programs,)](
        x, words, source, scales, bias, out, outputs, tiles, BIAS=bias is not None,
        STEPS=words.shape[-1] // (WARPS * WORDS), STAGES=sizes.stages, COLUMNS=COLUMNS, num_warps=WARPS,
        **_layouts(), **chained(x.device),
    )  # fmt: skip
    return out
