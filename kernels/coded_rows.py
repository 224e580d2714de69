"""Products of one to 64 rows with weights of codes: int8, 8-bit floats, or nibbles, and their scales.

Such a product should take as long as reading the codes. One row is multiplied by plain arithmetic; more rows by matrix
instructions, whose left operand is the weight, so that codes become numbers in the registers that are multiplied.
Where outputs alone make too few programs to keep the chip reading, several divide the inputs, and the last to end adds
their sums up, always in the same order. Codes are as in `frame.kernels.quantized`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import quantized
from .chain import await_previous, chained

#: The most rows of x.
MOST_ROWS = 64
#: Columns of a piece, which a thread reads at once: 16 bytes.
_NIBBLE_PIECE, _BYTE_PIECE = 32, 16
#: Of one row: outputs of a program, pieces of a step, and warps, of nibbles and of bytes.
ONE_NIBBLE_ROW, ONE_BYTE_ROW = (4, 64, 2), (4, 64, 2)
#: Of more rows: outputs of a program, columns of a step, steps on their way.
BLOCK_N, DEPTH, STAGES = 64, 128, 4
#: Programs that divide inputs are made until there are so many of a multiprocessor, of no fewer columns each.
_PROGRAMS, _LEAST_COLUMNS = 4, 512


@triton.jit
def _piece_scales(scales, zeros, where, there, GROUPED: tl.constexpr, ZEROS: tl.constexpr):
    """(scales, zeros) of pieces, as float32; where there are none of a kind, the others again."""
    scale = where.to(tl.float32)
    zero = scale
    if GROUPED:
        scale = tl.load(scales + where, mask=there, other=0.0).to(tl.float32)
    if ZEROS:
        zero = tl.load(zeros + where, mask=there, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def _one_row(
    x, codes, scales, zeros, bias, out, outputs, depth, groups,
    GROUP: tl.constexpr, ROWS_PER: tl.constexpr, NIBBLES: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    # a piece of 16 bytes is one thread's; GROUP 0: one scale for all columns, which multiplies the sum
    SIZE: tl.constexpr = 32 if NIBBLES else 16
    UNITS: tl.constexpr = 4 if NIBBLES else 16
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = output < outputs
    wide = output.to(tl.int64)
    piece, unit = tl.arange(0, PIECES), tl.arange(0, UNITS)
    source = codes + wide[:, None, None] * (depth // SIZE * UNITS) + (piece[:, None] * UNITS + unit[None, :])[None]
    scale_row = (wide // ROWS_PER * groups)[:, None]
    kept = there[:, None] & (piece * SIZE < depth)[None, :]
    ahead = tl.load(source, mask=kept[:, :, None], other=0.0)
    where = scale_row
    if GROUP:
        where = scale_row + (piece * SIZE // GROUP)[None, :]
    scale, zero = _piece_scales(scales, zeros, where, kept, GROUP > 0, ZEROS)
    acc = tl.zeros([BLOCK, PIECES], tl.float32)
    await_previous(CHAINED)
    for first in range(0, depth, PIECES * SIZE):
        found = ahead
        own_scale, own_zero = scale, zero
        later = first + PIECES * SIZE + piece * SIZE
        kept = there[:, None] & (later < depth)[None, :]
        ahead = tl.load(source + (first // SIZE + PIECES) * UNITS, mask=kept[:, :, None], other=0.0)
        if GROUP:
            scale, zero = _piece_scales(
                scales, zeros, scale_row + (later // GROUP)[None, :], kept, True, ZEROS
            )  # fmt: skip
        column = first + piece * SIZE
        if NIBBLES:
            lane = tl.arange(0, 8)
            at = x + column[:, None, None] + (unit[:, None] * 8 + lane[None, :])[None]
            value = tl.load(at, mask=(column < depth)[:, None, None], other=0.0).to(tl.float32)
            whole = tl.sum(tl.sum(value, 2), 1)
            # a nibble n as the float 1 + n / 16, of which the sum is taken off again at the end of the piece
            bits = (found[:, :, :, None] >> (lane * 4)[None, None, None, :]) & 15
            weight = ((bits << 19) | 0x3F800000).to(tl.float32, bitcast=True)
            part = tl.sum(tl.sum(weight * value[None], 3), 2)
            if ZEROS:
                part = 16 * (part - (1 + own_zero / 16) * whole[None, :])
            else:
                part = 16 * (part - 1.5 * whole[None, :])
        else:
            at = x + column[:, None] + unit[None, :]
            value = tl.load(at, mask=(column < depth)[:, None], other=0.0).to(tl.float32)
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
    """Of values [ROWS, WORDS · 8] those of each place in a word, eight of [ROWS, WORDS]."""
    even, odd = tl.split(tl.reshape(values, (ROWS, WORDS, 2, 2, 2)))  # by the lowest bit of the place
    a, c = tl.split(even)
    b, d = tl.split(odd)
    a0, a4 = tl.split(a)
    c2, c6 = tl.split(c)
    b1, b5 = tl.split(b)
    d3, d7 = tl.split(d)
    return a0, b1, c2, d3, a4, b5, c6, d7


@triton.jit
def _some_rows(
    x, codes, scales, zeros, bias, out, sums, arrived, rows, outputs, depth, groups, stride_x, columns, splits,
    GROUP: tl.constexpr, ROWS_PER: tl.constexpr, NIBBLES: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = DEPTH // 8
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there, wide = output < outputs, output.to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, DEPTH)
    scale_row = wide // ROWS_PER * groups
    begin = split * columns
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + columns, depth), DEPTH, num_stages=STAGES):
        column = first + lane
        kept = (row < rows)[:, None] & (column < depth)[None, :]
        value = tl.load(x + row[:, None] * stride_x + column[None, :], mask=kept, other=0.0)
        scale_at = scale_row
        if GROUP:
            scale_at = scale_row + first // GROUP
        zero = tl.zeros([BLOCK_N], tl.int32) + 8 * NIBBLES
        if ZEROS:
            zero = tl.load(zeros + scale_at, mask=there, other=0).to(tl.int32)
        part = acc
        if GROUP:
            part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if NIBBLES:
            word = first // 8 + tl.arange(0, WORDS)
            some = there[:, None] & (word < depth // 8)[None, :]
            words = tl.load(codes + wide[:, None] * (depth // 8) + word[None, :], mask=some, other=0)
            planes = _planes(value, BLOCK_M, WORDS)
            for place in tl.static_range(8):
                number = ((words >> (4 * place)) & 15) - zero[:, None]
                part = tl.dot(number.to(value.dtype), tl.trans(planes[place]), part, input_precision="ieee")
        else:
            some = there[:, None] & (column < depth)[None, :]
            found = tl.load(codes + wide[:, None] * depth + column[None, :], mask=some, other=0.0)
            if ZEROS:
                found = found.to(tl.int32) - zero[:, None]
            part = tl.dot(found.to(value.dtype), tl.trans(value), part, input_precision="ieee")
        if GROUP:
            acc += part * tl.load(scales + scale_at, mask=there, other=0.0).to(tl.float32)[:, None]
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
        if BIAS:
            acc += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


def fits(codes: Tensor, scales: Tensor, block: tuple[int, int], rows: int) -> bool:
    """Whether `product` takes the weight: pieces and steps are whole, and of one scale."""
    nibbles = codes.dtype == torch.int32
    depth, piece = codes.shape[-1] * (8 if nibbles else 1), _NIBBLE_PIECE if nibbles else _BYTE_PIECE
    grouped = scales.shape[-1] > 1
    whole = depth % piece == 0 and codes.is_contiguous() and scales.is_contiguous() and codes.data_ptr() % 16 == 0
    if rows == 1:
        return whole and (not grouped or block[1] % piece == 0)
    return whole and depth % 16 == 0 and (not grouped or block[1] % DEPTH == 0)


def few_rows(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    """As `quantized.few_rows`, by these kernels where they take the weight."""
    ours = fits(codes, scales, block, len(x))
    return (product if ours else quantized.few_rows)(x, codes, scales, block, zeros, bias)


def product(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None,
    sizes: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b for x [rows, K] of 16 bits, and codes [N, K], or nibbles int32 [N, K / 8], that `fits`; one launch.

    `sizes` are those of `ONE_NIBBLE_ROW`, or of more rows (outputs of a program, columns of a step, steps on their way,
    programs that divide the inputs), for measurements.
    """
    rows, outputs, groups = len(x), len(codes), scales.shape[-1]
    nibbles = codes.dtype == torch.int32
    depth = codes.shape[-1] * (8 if nibbles else 1)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    constants = {
        "GROUP": block[1] if groups > 1 else 0, "ROWS_PER": block[0], "NIBBLES": nibbles, "ZEROS": zeros is not None,
        "BIAS": bias is not None,
    }  # fmt: skip
    if rows == 1:
        most, pieces, warps = sizes or (ONE_NIBBLE_ROW if nibbles else ONE_BYTE_ROW)
        pieces = min(pieces, triton.next_power_of_2(depth // (_NIBBLE_PIECE if nibbles else _BYTE_PIECE)))
        _one_row[(triton.cdiv(outputs, most),)](
            x, codes, scales, zeros, bias, out, outputs, depth, groups,
            **constants, BLOCK=most, PIECES=pieces, num_warps=warps, **chained(x.device),
        )  # fmt: skip
        return out
    block_n, width, stages, *given = sizes or (BLOCK_N, DEPTH, STAGES)
    tiles = triton.cdiv(outputs, block_n)
    splits = given[0] if given else _splits(tiles, depth, _multiprocessors(x.device))
    columns = triton.cdiv(triton.cdiv(depth, splits), width) * width
    splits = triton.cdiv(depth, columns)
    sums = torch.empty((splits, rows, outputs) if splits > 1 else 1, dtype=torch.float32, device=x.device)
    _some_rows[(tiles, splits)](
        x, codes, scales, zeros, bias, out, sums, _arrivals(x.device, tiles), rows, outputs, depth, groups, x.stride(0),
        columns, splits, **constants, SPLIT=splits > 1, BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=block_n,
        DEPTH=width, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out


def _splits(tiles: int, depth: int, multiprocessors: int) -> int:
    """Programs that divide the inputs of a tile of outputs."""
    wanted = -(-_PROGRAMS * multiprocessors // tiles)
    return max(1, min(wanted, depth // _LEAST_COLUMNS, 16))


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> Tensor:
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def _arrivals(device: torch.device, tiles: int) -> Tensor:
    """Zeros, one for each tile of outputs; kernels leave them as zeros. Products of one device follow one another."""
    counters = _counters(device)
    return counters if tiles <= len(counters) else torch.zeros(tiles, dtype=torch.int32, device=device)
