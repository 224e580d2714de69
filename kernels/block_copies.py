"""Copies of many pieces of memory in one launch: of this GPU, of another one whose memory it maps, of the host.

KV blocks lie apart, a piece for each layer and block, where they come from and where they go. Copy engines would take
one call for each of them; this kernel takes one for all, and few multiprocessors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Bytes that a program has under way: 16 for each of its threads, four times.
_BYTES = 32 << 10
#: Programs that fill the way to another GPU; steps run on the multiprocessors that they leave.
PROGRAMS = 48
#: Types of words, by their bytes.
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
#: By type: the exponent, all of whose bits are set in what is no number, its lowest bit, and the bit above it.
_EXPONENTS = {
    torch.float32: (4, 0x7F800000, 0x00800000),
    torch.float16: (2, 0x7C00, 0x0400),
    torch.bfloat16: (2, 0x7F80, 0x0080),
    torch.float8_e5m2: (1, 0x7C, 0x04),
    torch.float8_e4m3fn: (1, 0x7F, 0x01),  # which has no infinity, and one NaN of each sign
}
CHECKED = frozenset(_EXPONENTS)


# a number 1 would become a constant of Python's, and each kind of count a kernel to compile in the midst of a step
@triton.jit(do_not_specialize=["count", "parts", "exponents", "lowest", "signs"])
def _copy_pieces(
    table, finite, count, parts, exponents, lowest, signs,
    UNITS: tl.constexpr, WORDS: tl.constexpr, word: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Of each piece `parts` runs of UNITS units, each of WORDS words."""
    item = tl.program_id(0).to(tl.int64)
    unit, words = tl.arange(0, UNITS)[:, None], tl.arange(0, WORDS)[None, :]
    width: tl.constexpr = WORDS * (word.primitive_bitwidth // 8)
    while item < count * parts:
        row = table + item // parts * 4
        source = tl.multiple_of(tl.load(row).to(tl.pointer_type(word)), width)
        target = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(word)), width)
        first = item % parts * UNITS
        kept = first + unit < tl.load(row + 2) // width
        place = (first + unit) * WORDS + words
        found = tl.load(source + place, mask=kept, other=0, cache_modifier=".cg")
        tl.store(target + place, found, mask=kept)
        if CHECK:
            # several numbers in a word: adding to an exponent that is full carries into its sign, and no further
            full = ((found & exponents.to(word)) + lowest.to(word)) & signs.to(word)
            if tl.max(tl.max((full != 0).to(tl.int32), 1), 0) > 0:
                tl.store(finite + tl.load(row + 3), 0)
        item += tl.num_programs(0)


def copy_pieces(
    table: Tensor,
    most: int,
    unit: int,
    *,
    programs: int = PROGRAMS,
    finite: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Copies pieces of memory; `table` int64 [n, 4] has the address of each, that of its copy, its bytes, its owner.

    `most` are the bytes of the longest piece; `unit`, a power of two of at most 16, divides all addresses and sizes.
    Pieces may not overlap. With `dtype`, one of `CHECKED`, `finite` bool [owners], on the device or in pinned memory,
    becomes False for owners of pieces which hold values that are not finite, and stays what it is for others.
    """
    if not len(table):
        return
    units, words = _BYTES // 16, 2 if unit == 16 else 1
    parts = triton.cdiv(most, units * unit)
    checks = (0, 0, 0) if dtype is None else _lanes(dtype, unit // words)
    flags = table if finite is None else finite.view(torch.int8)
    _copy_pieces[(min(len(table) * parts, programs),)](
        table, flags, len(table), parts, *checks, units, words, _WORDS[unit // words], dtype is not None, num_warps=16
    )  # fmt: skip


def _lanes(dtype: torch.dtype, word: int) -> tuple[int, int, int]:
    """Exponents, their lowest bits and the signs of all numbers in a word of so many bytes, as signed integers."""
    size, exponent, lowest = _EXPONENTS[dtype]
    if word % size:
        raise ValueError(f"words of {word} bytes hold no {dtype}")
    repeated = sum(1 << 8 * at for at in range(0, word, size))
    sign = repeated << (8 * size - 1)
    return repeated * exponent, repeated * lowest, sign - (1 << 8 * word if sign >> (8 * word - 1) else 0)
