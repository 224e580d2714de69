"""Rows of bfloat16 in two halves: each number as the sum of two floats of 8 bits (e4m3), whose products are quick.

A bfloat16 has 8 significant bits, and such a float four. Numbers below 2⁻⁹ of the largest of their row err by up to
2⁻¹⁷ of that one, others are exact. The columns lie in the order in which threads hold bytes of nibbles. Knows no
weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained

#: The most rows; there is memory for the next power of two of them, and for no fewer than the least.
MOST_ROWS, _LEAST_ROWS = 64, 16
#: Columns of a chunk, of which the sums of two are there at a time; the most columns of one sum.
CHUNK = 128
#: What a byte whose value is 1 is as a float of 8 bits.
UNIT = tl.constexpr(2.0**-9)


@triton.jit
def _rounded(values):
    """Floats of four significant bits as floats of 8 bits hold them: multiples of 2⁻⁹, below 2⁻⁶.

    Nothing is converted back from 8 bits: for that ptxas reads the stack pointer instead of a packed pair.
    """
    return tl.where(tl.abs(values) < 2.0**-6, (values + 24576.0) - 24576.0, values)


@triton.jit
def _split_rows(x, halves, sums, factors, rows, depth, stride_x, units, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                CHAINED: tl.constexpr):  # fmt: skip
    """A program for each row, which may be beyond those of x; x and its stride are of pairs of numbers.

    The bytes of WIDTH columns are divided among four threads, of which each holds four at a time.
    """
    await_previous(CHAINED)
    HALF: tl.constexpr = WIDTH // 2
    row, room = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    unit, place = lane // HALF, lane % HALF
    pair = unit * HALF + place // 4 % 4 * (WIDTH // 8) + place // 16 * 4 + place % 4
    pair = tl.max_contiguous(tl.multiple_of(pair, 4), 4)
    kept = unit < depth // WIDTH  # the compiler sees that neighbours are kept or not together
    pairs = tl.load(x + row.to(tl.int64) * stride_x + pair, mask=kept & (row < rows), other=0)
    even = (pairs << 16).to(tl.float32, bitcast=True)
    odd = (pairs & -65536).to(tl.float32, bitcast=True)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 0)
    # the largest becomes 128 and some: a power of two leaves numbers exact
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 16), 254)
    small = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    found = tl.zeros([BLOCK], tl.float32)
    for odds in tl.static_range(2):
        if odds:
            values = odd * small
        else:
            values = even * small
        upper = (values.to(tl.int32, bitcast=True) & -1048576).to(tl.float32, bitcast=True)  # four significant bits
        high = _rounded(upper)
        low = _rounded(values - high)
        at = halves + row * depth + unit * WIDTH + odds * HALF + place
        tl.store(at, low.to(halves.dtype.element_ty), mask=kept)
        tl.store(at + room * depth, high.to(halves.dtype.element_ty), mask=kept)
        found += low + high
    total = tl.sum(tl.reshape(found, (BLOCK // HALF, HALF)), 1) * UNIT
    own = tl.arange(0, BLOCK // HALF)
    tl.store(sums + own * room + row, total, mask=own < units)
    tl.store(factors + row, ((exponent - 7) << 23).to(tl.float32, bitcast=True) / UNIT)


def room_for(rows: int) -> int:
    """The rows that there is memory for, where x has so many."""
    return max(_LEAST_ROWS, 1 << (rows - 1).bit_length())


def width_of(group: int, depth: int) -> int:
    """The columns that one product of matrix instructions adds up, for groups of so many."""
    return CHUNK if group == depth else min(group, CHUNK)


def split_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(halves e4m3 [2 · room, K], sums float32 [K / width, room], factors float32 [room]) of bfloat16 x [rows, K].

    Room is `room_for(rows)`; rows beyond those of x are zeros. The low halves come first. Columns of each `width` lie
    as threads hold nibbles; a sum is that of these, and those of whole pairs of chunks are there. Sums are times 2⁻⁹,
    which factors make good.
    """
    (rows, depth), room = x.shape, room_for(len(x))
    if x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.contiguous()
    pairs = x.view(torch.int32)
    halves = torch.empty((2 * room, depth), dtype=torch.float8_e4m3fn, device=x.device)
    units = triton.cdiv(depth, 2 * CHUNK) * 2 * CHUNK // width
    sums = torch.empty((units, room), dtype=torch.float32, device=x.device)
    factors = torch.empty(room, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(max(depth // 2, CHUNK))
    _split_rows[(room,)](
        pairs, halves, sums, factors, rows, depth, pairs.stride(0), units, WIDTH=width, BLOCK=block,
        num_warps=min(16, max(1, block // 128)), **chained(x.device),
    )  # fmt: skip
    return halves, sums, factors
