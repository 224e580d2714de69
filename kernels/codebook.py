"""Weights of nibbles, put together in one launch; the reference of those of a table is `Ops.dequantize_table`.

That should take as long as moving the bytes. Rows lie one behind the other, and so do their scales, so a program takes
a run of words of codes whatever rows they are of, and chips read and write memory in its order. A thread has a word at
a time: it writes the eight numbers, 16 bytes of a 16-bit type, at once, and reads one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import as_factors, float_numbers, float_unit
from .nibbles import Nibbles, fits as groups_fit, nibble_codes, scaled
from .portable import INTERPRETED

#: Columns that groups fill, or that fill groups.
_COLUMNS = 128


@dataclass(frozen=True)
class Run:
    """What a program puts together: a word for each thread of its warps, `steps` times, all of which are read first."""

    warps: int
    steps: int

    @property
    def words(self) -> int:
        """Words of codes of a step."""
        return 32 * self.warps


#: What `benchmarks/kernels/codebook_sweep.py` names the best run.
RUN = Run(warps=4, steps=2)
_INTERPRETED = tl.constexpr(INTERPRETED)
#: `float_unit`, as a bfloat16.
_UNIT_BITS = tl.constexpr(0x7E80)


@triton.jit
def _shared_by(pointer, first, lane, PER: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr):
    """[WORDS] pointers to what PER words share, of the words from `first` on, a multiple of WORDS; it has SIZE."""
    if WORDS % PER == 0:
        found = pointer + first // PER * SIZE + lane // PER * SIZE
    else:
        found = pointer + first // PER * SIZE + ((first % PER).to(tl.int32) + lane) // PER * SIZE
    return found


@triton.jit
def _read_words(
    low, high, scales, minima, outer, numbers, first, lane, kept,
    GROUP: tl.constexpr, HIGH: tl.constexpr, MINIMA: tl.constexpr, OUTER: tl.constexpr, ROW: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Words from `first` on and what `scaled` needs of each, all [WORDS]; what is absent is the words again."""
    words = tl.load(low + first + lane, mask=kept, other=0)
    more, least, wide, least_wide, own = words, words, words, words, words
    if HIGH:
        at = _shared_by(high, first, lane, 4 // HIGH, WORDS, 1)
        more = tl.load(at, mask=kept, other=0) >> (lane % (4 // HIGH) * (8 * HIGH))
    factors = tl.load(_shared_by(scales, first, lane, GROUP // 8, WORDS, 1), mask=kept, other=0.0)
    if OUTER:
        at = _shared_by(outer, first, lane, 32, WORDS, OUTER)
        wide = tl.load(at, mask=kept, other=0.0)
        if MINIMA:
            least = tl.load(_shared_by(minima, first, lane, GROUP // 8, WORDS, 1), mask=kept, other=0)
            least_wide = tl.load(at + 1, mask=kept, other=0.0)
    if ROW:
        own = tl.load(_shared_by(numbers, first, lane, ROW, WORDS, 1), mask=kept, other=0.0)
    return words, more, factors, least, wide, least_wide, own


@triton.jit
def _floats(found, WORDS: tl.constexpr):
    """As `_weights`, in bfloat16, of 4-bit floats whose scales are exponents of two: without a table.

    All factors are powers of two, so nothing is rounded: the least number that is not 0 is 2⁻¹²⁷, and what a bfloat16
    has no exponent for a float32 has none for either.
    """
    words, exponents = found[0], found[2]
    values = float_numbers(words[:, None], tl.bfloat16, WORDS, 8)
    if _INTERPRETED:  # which multiplies no bfloat16, and takes small ones for 0
        values = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        weight = values * float_unit(tl.bfloat16) * as_factors(exponents, True)[:, None]
    else:
        unit = tl.full([1, 1], _UNIT_BITS, tl.int16).to(tl.bfloat16, bitcast=True)
        weight = values * unit * (exponents.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)[:, None]
    return weight


@triton.jit
def _weights(
    found, table,
    ZERO: tl.constexpr, HIGH: tl.constexpr, MINIMA: tl.constexpr, OUTER: tl.constexpr, EXPONENTS: tl.constexpr,
    TABLE: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """float32 [WORDS, 8] of what `_read_words` found."""
    words, more, factors, least, wide, least_wide, own = found
    codes = nibble_codes(words[:, None], more[:, None], HIGH, WORDS, 8)
    if not TABLE:
        values = (codes - ZERO).to(tl.float32)
    else:
        values = tl.load(table + codes)
    return scaled(
        values, factors[:, None], least[:, None], wide[:, None], least_wide[:, None], own,
        MINIMA, OUTER, EXPONENTS, ROW > 0, 8, WORDS, 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size"])
def _table_weights(
    low, high, scales, minima, outer, table, numbers, out, size,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HIGH: tl.constexpr, MINIMA: tl.constexpr, OUTER: tl.constexpr,
    EXPONENTS: tl.constexpr, TABLE: tl.constexpr, FLOATS: tl.constexpr, ROW: tl.constexpr,
    WORDS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    # of `size` words; a ROW of so many has a number of its own
    start = tl.program_id(0).to(tl.int64) * (STEPS * WORDS)
    left = tl.minimum(size - start, STEPS * WORDS).to(tl.int32)
    lane = tl.arange(0, WORDS)
    coming = ()
    for step in tl.static_range(STEPS):
        found = _read_words(
            low, high, scales, minima, outer, numbers, start + step * WORDS, lane, lane < left - step * WORDS,
            GROUP, HIGH, MINIMA, OUTER, ROW, WORDS,
        )  # fmt: skip
        coming += (found,)  # type: ignore[assignment]
    for step in tl.static_range(STEPS):
        if FLOATS:
            weight = _floats(coming[step], WORDS)
        else:
            weight = _weights(
                coming[step], table, ZERO, HIGH, MINIMA, OUTER, EXPONENTS, TABLE, ROW, WORDS
            )  # fmt: skip
        at = out + (start + step * WORDS) * 8 + (lane[:, None] * 8 + tl.arange(0, 8)[None, :])
        tl.store(at, weight.to(out.dtype.element_ty), mask=(lane < left - step * WORDS)[:, None])


def fits(group: int) -> bool:
    """Whether the kernel takes groups of so many columns."""
    return groups_fit(group, _COLUMNS)


def dequantize(weight: Nibbles, dtype: torch.dtype, run: Run = RUN) -> Tensor:
    """[..., N, K] of `dtype`, of a weight whose groups of columns `fits`."""
    out = torch.empty((*weight.low.shape[:-1], weight.depth), dtype=dtype, device=weight.low.device)
    sizes = weight.sizes(_COLUMNS)
    del sizes["SPAN"]
    row = weight.low.shape[-1] if sizes.pop("NUMBERS") else 0
    floats = weight.is_float4 and bool(sizes["EXPONENTS"]) and not row and dtype == torch.bfloat16
    _table_weights[(triton.cdiv(weight.low.numel(), run.steps * run.words),)](
        *weight.pointers, out, weight.low.numel(), **sizes, FLOATS=floats, ROW=row,
        WORDS=run.words, STEPS=run.steps, num_warps=run.warps,
    )  # fmt: skip
    return out


def dequantize_table(
    packed: Tensor, scales: Tensor, table: Tensor, numbers: Tensor | None = None, dtype: torch.dtype | None = None,
    *, is_float4: bool = False,
) -> Tensor:  # fmt: skip
    """[..., N, K] of `dtype` from contiguous tensors whose groups of columns `fits`."""
    return dequantize(Nibbles(packed, scales, table, numbers, is_float4=is_float4), dtype or torch.float32)
