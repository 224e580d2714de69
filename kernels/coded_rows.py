"""Products of one to 64 rows with weights of codes: int8, 8-bit floats, or nibbles, and their scales.

Such a product should take as long as reading the codes. One row is multiplied by bytes with plain arithmetic; all else
by matrix instructions, whose left operand is the weight, so that codes become numbers in the registers that are
multiplied. Where outputs alone make too few programs to keep the chip reading, several divide the inputs, and the last
to end adds their sums up, always in the same order. Codes are as in `frame.kernels.quantized`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import quantized
from .chain import await_previous, chained
from .hopper import hopper_kernel
from .linear_invariant import num_multiprocessors

#: The most rows of x.
MOST_ROWS = 64
#: Bytes that a thread reads at once for one row; outputs of a program, such pieces of a step, and warps.
PIECE, ONE_ROW = 16, (4, 64, 2)
#: Of other products: outputs of a program, columns of a step, steps on their way.
BLOCK_N, DEPTH, STAGES = 64, 128, 4
#: Programs that divide inputs are made while all are not more than so many of a multiprocessor, of so many columns.
_PROGRAMS, _LEAST_COLUMNS = 2, 512
#: By the type of x the float that has only zeros in its lowest four bits and steps of one, and the bits of two of them.
_BASES = {torch.bfloat16: (128, 0x43004300), torch.float16: (1024, 0x64006400)}


@triton.jit
def _piece_scales(scales, zeros, where, there, GROUPED: tl.constexpr, ZEROS: tl.constexpr):
    """(scales, zeros) of pieces, as float32; where there are none of a kind, the others again."""
    scale = where.to(tl.float32)
    if GROUPED:
        scale = tl.load(scales + where, mask=there, other=0.0).to(tl.float32)
    zero = scale
    if ZEROS:
        zero = tl.load(zeros + where, mask=there, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def _one_row(
    x, codes, scales, zeros, bias, out, outputs, depth, groups,
    GROUP: tl.constexpr, ROWS_PER: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    # GROUP 0: one scale for all columns, which multiplies the sum
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = output < outputs
    wide = output.to(tl.int64)
    piece, unit = tl.arange(0, PIECES) * SIZE, tl.arange(0, SIZE)
    source = codes + wide[:, None, None] * depth + (piece[:, None] + unit[None, :])[None]
    scale_row = (wide // ROWS_PER * groups)[:, None]
    kept = there[:, None] & (piece < depth)[None, :]
    ahead = tl.load(source, mask=kept[:, :, None], other=0.0)
    where = scale_row
    if GROUP:
        where = scale_row + (piece // GROUP)[None, :]
    scale, zero = _piece_scales(scales, zeros, where, kept, GROUP > 0, ZEROS)
    acc = tl.zeros([BLOCK, PIECES], tl.float32)
    await_previous(CHAINED)
    for first in range(0, depth, PIECES * SIZE):
        found, own_scale, own_zero = ahead, scale, zero
        later = first + PIECES * SIZE
        kept = there[:, None] & (later + piece < depth)[None, :]
        ahead = tl.load(source + later, mask=kept[:, :, None], other=0.0)
        if GROUP:
            scale, zero = _piece_scales(
                scales, zeros, scale_row + ((later + piece) // GROUP)[None, :], kept, True, ZEROS
            )  # fmt: skip
        at = x + first + piece[:, None] + unit[None, :]
        value = tl.load(at, mask=(first + piece < depth)[:, None], other=0.0).to(tl.float32)
        part = tl.sum(found.to(tl.float32) * value[None], 2)
        if ZEROS:
            part -= own_zero * tl.sum(value, 1)[None, :]
        if GROUP:
            part *= own_scale
        acc += part
    total = tl.sum(acc, 1)
    if not GROUP:
        total *= tl.load(scales + wide // ROWS_PER * groups, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + output, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _planes(values, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Of values [ROWS, WORDS · 8] those of places p and p + 4 in a word, by p: four pairs of [ROWS, WORDS]."""
    even, odd = tl.split(tl.reshape(values, (ROWS, WORDS, 2, 2, 2)))  # by the lowest bit of the place
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return tl.split(a), tl.split(b), tl.split(c), tl.split(d)


@triton.jit
def _nibble_dot(words, value, part, BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """part + Σ (base + n) x over nibbles n of words [N, WORDS] and x of `value` [ROWS, WORDS · 8].

    The bits BITS of two 16-bit floats stand for the base, and a nibble in the lowest ones adds itself: nothing is
    converted, and every such number is exact.
    """
    planes = _planes(value, ROWS, WORDS)
    for place in tl.static_range(4):
        two = ((words >> (4 * place)) & 0x000F000F) | BITS
        low = two.to(tl.int16).to(value.dtype, bitcast=True)
        high = (two >> 16).to(tl.int16).to(value.dtype, bitcast=True)
        part = tl.dot(low, tl.trans(planes[place][0]), part, input_precision="ieee")
        part = tl.dot(high, tl.trans(planes[place][1]), part, input_precision="ieee")
    return part


@triton.jit(do_not_specialize=["rows"])
def _some_rows(
    x, x_scales, codes, scales, zeros, bias, out, sums, arrived,
    rows, outputs, depth, groups, x_groups, stride_x, columns, splits,
    GROUP: tl.constexpr, ROWS_PER: tl.constexpr, NIBBLES: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    X_SCALES: tl.constexpr, X_GROUP: tl.constexpr, SPLIT: tl.constexpr, BASE: tl.constexpr, BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = DEPTH // 8
    await_previous(CHAINED)
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there, wide = output < outputs, output.to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, DEPTH)
    scale_row = wide // ROWS_PER * groups
    begin = split * columns
    # sums of 8-bit floats are kept apart as well: the chip adds them up with fewer bits
    APART: tl.constexpr = GROUP > 0 or X_SCALES or NIBBLES
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + columns, depth), DEPTH, num_stages=STAGES):
        column = first + lane
        kept = (row < rows)[:, None] & (column < depth)[None, :]
        value = tl.load(x + row[:, None] * stride_x + column[None, :], mask=kept, other=0.0)
        scale_at = scale_row
        if GROUP:
            scale_at = scale_row + first // GROUP
        part = acc
        if APART:
            part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if NIBBLES:
            word = first // 8 + tl.arange(0, WORDS)
            some = there[:, None] & (word < depth // 8)[None, :]
            words = tl.load(codes + wide[:, None] * (depth // 8) + word[None, :], mask=some, other=0)
            part = _nibble_dot(words, value, part, BITS, BLOCK_M, WORDS)
            zero = tl.full([BLOCK_N], BASE + 8, tl.float32)
            if ZEROS:
                zero = BASE + tl.load(zeros + scale_at, mask=there, other=0).to(tl.float32)
            part -= zero[:, None] * tl.sum(value.to(tl.float32), 1)[None, :]
        else:
            some = there[:, None] & (column < depth)[None, :]
            found = tl.load(codes + wide[:, None] * depth + column[None, :], mask=some, other=0.0)
            if ZEROS:
                found = found.to(tl.int32) - tl.load(zeros + scale_at, mask=there, other=0).to(tl.int32)[:, None]
            part = tl.dot(found.to(value.dtype), tl.trans(value), part, input_precision="ieee")
        if GROUP:
            part *= tl.load(scales + scale_at, mask=there, other=0.0).to(tl.float32)[:, None]
        if X_GROUP:
            part *= tl.load(x_scales + row * x_groups + first // X_GROUP, mask=row < rows, other=0.0)[None, :]
        if APART:
            acc += part
        else:
            acc = part
    place = row[None, :] * outputs + output[:, None]
    inside = (row < rows)[None, :] & there[:, None]
    last = True
    if SPLIT:
        tl.store(sums + split * rows * outputs + place, acc, mask=inside)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            source = sums + place
            for _ in range(splits):
                acc += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
                source += rows * outputs
            tl.store(arrived + tile, 0)
    if last:
        if not GROUP:
            acc *= tl.load(scales + scale_row, mask=there, other=0.0).to(tl.float32)[:, None]
        if X_SCALES and not X_GROUP:
            acc *= tl.load(x_scales + row, mask=row < rows, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


def fits(codes: Tensor, scales: Tensor, block: tuple[int, int], rows: int) -> bool:
    """Whether `product` takes the weight: pieces and steps are whole, and of one scale."""
    depth, unit = _depth(codes), DEPTH if rows > 1 or _is_nibbles(codes) else PIECE
    whole = depth % 32 == 0 and codes.is_contiguous() and scales.is_contiguous() and codes.data_ptr() % 16 == 0
    return whole and (scales.shape[-1] == 1 or block[1] % unit == 0)


def few_rows(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    """As `quantized.few_rows`, by these kernels where they take the weight."""
    if (out := measured(x, codes, scales, block, zeros, bias)) is not None:
        return out
    ours = fits(codes, scales, block, len(x))
    return (product if ours else quantized.few_rows)(x, codes, scales, block, zeros, bias)


def measured(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """As `few_rows`, by a kernel in Gluon; None where it was not measured to be the quickest."""
    kernel = hopper_kernel(x.device, "coded_choice", "quickest")
    return None if kernel is None else kernel(x, codes, scales, block, zeros, bias)


def product(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None,
    sizes: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b for x [rows, K] of 16 bits, and codes [N, K], or nibbles int32 [N, K / 8], that `fits`; one launch.

    `sizes` are those of `ONE_ROW`, or of other products (outputs of a program, columns of a step, steps on their way,
    programs that divide the inputs), for measurements.
    """
    if len(x) > 1 or _is_nibbles(codes):
        return _launch(x, None, codes, scales, block, zeros, bias, x.dtype, sizes)
    outputs, depth, groups = *codes.shape, scales.shape[-1]
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    most, pieces, warps = sizes or ONE_ROW
    _one_row[(triton.cdiv(outputs, most),)](
        x, codes, scales, zeros, bias, out, outputs, depth, groups,
        GROUP=block[1] if groups > 1 else 0, ROWS_PER=block[0], ZEROS=zeros is not None, BIAS=bias is not None,
        BLOCK=most, PIECES=min(pieces, triton.next_power_of_2(depth // PIECE)), SIZE=PIECE, num_warps=warps,
        **chained(x.device),
    )  # fmt: skip
    return out


def rounded_product(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None,
    dtype: torch.dtype, sizes: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b of `dtype` for 2 to 64 rows x [rows, K] of 8-bit floats, as `quantized.round_rows` makes them.

    `x_scales` float32 [rows, 1], or [rows, ⌈K / 128⌉]. Codes are 8-bit floats that `fits`.
    """
    return _launch(x, x_scales, codes, scales, block, None, bias, dtype, sizes)


def _launch(
    x: Tensor, x_scales: Tensor | None, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None,
    bias: Tensor | None, dtype: torch.dtype, sizes: tuple[int, ...] | None,
) -> Tensor:  # fmt: skip
    rows, outputs, depth, groups = len(x), len(codes), _depth(codes), scales.shape[-1]
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    block_n, width, stages, *given = sizes or (BLOCK_N, DEPTH, STAGES)
    tiles = triton.cdiv(outputs, block_n)
    wanted = given[0] if given else min(_PROGRAMS * num_multiprocessors(x.device) // tiles, depth // _LEAST_COLUMNS, 16)
    columns = triton.cdiv(triton.cdiv(depth, max(1, wanted)), width) * width
    splits = triton.cdiv(depth, columns)
    sums = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device) if splits > 1 else out
    base, bits = _BASES.get(x.dtype, (0, 0))
    x_groups = 1 if x_scales is None else x_scales.shape[-1]
    _some_rows[(tiles, splits)](
        x, x_scales, codes, scales, zeros, bias, out, sums, arrivals(x.device, tiles),
        rows, outputs, depth, groups, x_groups, x.stride(0), columns, splits,
        GROUP=block[1] if groups > 1 else 0, ROWS_PER=block[0], NIBBLES=_is_nibbles(codes), ZEROS=zeros is not None,
        BIAS=bias is not None, X_SCALES=x_scales is not None, X_GROUP=quantized.X_GROUP if x_groups > 1 else 0,
        SPLIT=splits > 1, BASE=base, BITS=bits,
        BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=block_n, DEPTH=width, STAGES=stages, num_warps=4,
        **chained(x.device),
    )  # fmt: skip
    return out


def _is_nibbles(codes: Tensor) -> bool:
    return codes.dtype == torch.int32


def _depth(codes: Tensor) -> int:
    return codes.shape[-1] * (8 if _is_nibbles(codes) else 1)


@lru_cache(maxsize=16)
def counters(device: torch.device) -> Tensor:
    """Zeros int32 [65536] that stay on the device: how many of the programs that divide a tile's inputs have ended."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def arrivals(device: torch.device, tiles: int) -> Tensor:
    """Zeros, one for each tile of outputs; kernels leave them as zeros. Products of one device follow one another."""
    kept = counters(device)
    return kept if tiles <= len(kept) else torch.zeros(tiles, dtype=torch.int32, device=device)
