"""Weights from nibbles in the registers of a kernel, for one that stores them and one that multiplies by them.

Nibbles come as `frame.ops.unpack_nibbles` reads them. They are codes of a table of sixteen numbers, or, with one or two
bits more, integers whose scales are codes too, as those of GGUF's K types.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The least group of inputs that the kernels take.
LEAST_GROUP = 8


@dataclass(frozen=True)
class Nibbles:
    """A weight [..., N, K] on a device; all tensors are contiguous.

    With a `table` float32 [16], w = table[code] · scale · number, of scales [..., N, K / g], uint8 ones being exponents
    of two, and `numbers` float32 [..., N, 1] or None; `is_float4` says that it has the 4-bit floats (e2m1) in the order
    of their bits. Without, w = (code - `zero`) · scale · outer[0] - minimum · outer[1], of 8-bit `scales` and `minima`
    [..., N, K / g], and `outer` [..., N, K / 256, 1 or 2]; `high` int32 has the upper bits of codes.
    """

    low: Tensor
    scales: Tensor
    table: Tensor | None = None
    numbers: Tensor | None = None
    high: Tensor | None = None
    minima: Tensor | None = None
    outer: Tensor | None = None
    zero: int = 0
    is_float4: bool = False

    @property
    def depth(self) -> int:
        """K."""
        return self.low.shape[-1] * 8

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.depth // self.scales.shape[-1]

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order in which kernels take them."""
        return self.low, self.high, self.scales, self.minima, self.outer, self.table, self.numbers

    def sizes(self, width: int) -> dict[str, int | bool]:
        """The constants of kernels that read `width` columns at once."""
        return {
            "GROUP": self.group, "SPAN": min(self.group, width), "ZERO": self.zero,
            "HIGH": 0 if self.high is None else 4 * self.high.shape[-1] // self.low.shape[-1],
            "MINIMA": self.minima is not None, "OUTER": 0 if self.outer is None else self.outer.shape[-1],
            "EXPONENTS": self.table is not None and self.scales.dtype == torch.uint8,
            "NUMBERS": self.numbers is not None, "TABLE": self.table is not None,
        }  # fmt: skip


def fits(group: int, width: int) -> bool:
    """Whether groups of so many inputs fill steps of `width`, or steps fill groups."""
    return group % width == 0 or (LEAST_GROUP <= group < width and width % group == 0)


@triton.jit
def read_nibbles(
    low, high, scales, minima, outer, row, there, first, depth, groups,
    GROUP: tl.constexpr, SPAN: tl.constexpr, HIGH: tl.constexpr, MINIMA: tl.constexpr, OUTER: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """What `nibble_weights` needs of rows and WIDTH columns from `first` on; what is absent is the words again.

    SPAN columns of these share a scale. HIGH is how many bits there are beside the nibbles, packed alike; OUTER how
    many numbers multiply the scales, and the minima, of each 256 columns.
    """
    word = first // 8 + tl.arange(0, WIDTH // 8)
    kept = there[:, None] & (word < depth // 8)[None, :]
    words = tl.load(low + row[:, None] * (depth // 8) + word[None, :], mask=kept, other=0)
    more, least, wide, least_wide = words, words, words, words
    if HIGH:
        PER: tl.constexpr = 32 // HIGH
        at = first // PER + tl.arange(0, WIDTH // PER)
        kept = there[:, None] & (at < depth // PER)[None, :]
        more = tl.load(high + row[:, None] * (depth // PER) + at[None, :], mask=kept, other=0)
    group = first // GROUP + tl.arange(0, WIDTH // SPAN)
    kept = there[:, None] & (group < groups)[None, :]
    factors = tl.load(scales + row[:, None] * groups + group[None, :], mask=kept, other=0.0)
    if OUTER:
        block = (row[:, None] * (depth // 256) + (group * GROUP // 256)[None, :]) * OUTER
        wide = tl.load(outer + block, mask=kept, other=0.0)
        if MINIMA:
            least = tl.load(minima + row[:, None] * groups + group[None, :], mask=kept, other=0)
            least_wide = tl.load(outer + block + 1, mask=kept, other=0.0)
    return words, more, factors, least, wide, least_wide


@triton.jit
def nibble_weights(
    words, more, factors, least, wide, least_wide, table, numbers,
    ZERO: tl.constexpr, HIGH: tl.constexpr, MINIMA: tl.constexpr, OUTER: tl.constexpr, EXPONENTS: tl.constexpr,
    NUMBERS: tl.constexpr, TABLE: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, WIDTH] of what `read_nibbles` returns; `numbers` [BLOCK_N] multiply too."""
    codes = nibble_codes(words, more, HIGH, BLOCK_N, WIDTH)
    if TABLE:
        values = tl.load(table + codes)
    else:
        values = (codes - ZERO).to(tl.float32)
    return scaled(
        values, factors, least, wide, least_wide, numbers, MINIMA, OUTER, EXPONENTS, NUMBERS, SPAN, BLOCK_N, WIDTH
    )


@triton.jit
def nibble_codes(words, more, HIGH: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """int32 [BLOCK_N, WIDTH]: the codes of words [BLOCK_N, WIDTH / 8], whose HIGH upper bits lie in `more`."""
    codes = tl.reshape((words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15, (BLOCK_N, WIDTH))
    if HIGH:
        PER: tl.constexpr = WIDTH // more.shape[1]
        bits = (more[:, :, None] >> (tl.arange(0, PER) * HIGH)[None, None, :]) & (2**HIGH - 1)
        codes |= tl.reshape(bits, (BLOCK_N, WIDTH)) << 4
    return codes


@triton.jit
def scaled(
    values, factors, least, wide, least_wide, numbers,
    MINIMA: tl.constexpr, OUTER: tl.constexpr, EXPONENTS: tl.constexpr, NUMBERS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, WIDTH]: values of codes times what multiplies each SPAN of them, less their minimum."""
    if EXPONENTS:
        factors = (factors.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    factors = factors.to(tl.float32)
    if OUTER:
        factors *= wide.to(tl.float32)
    if NUMBERS:
        factors *= numbers[:, None]
    weight = tl.reshape(values, (BLOCK_N, WIDTH // SPAN, SPAN)) * factors[:, :, None]
    if MINIMA:
        weight -= (least.to(tl.float32) * least_wide.to(tl.float32))[:, :, None]
    return tl.reshape(weight, (BLOCK_N, WIDTH))
