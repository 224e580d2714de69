"""Numbers of weights from their codes, in the registers of a kernel that multiplies by them.

Nibbles come as words of eight, the first in the lowest bits, as `frame.ops.unpack_nibbles` reads them. Two codes of a
word are made numbers at a time: they lie 16 bits apart, as a pair of 16-bit floats does in a register.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Four floats of 8 bits (e4m3) in a word to two words of bfloat16: sign and the seven other bits are moved, which gives
#: 2 ** -120 of the number. What is no number becomes 480.
E4M3_TO_BF16 = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07F007F0;
and.b32 d, d, 0x07F007F0;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
mov.b32 c, 0x7B807B80;
mul.rn.bf16x2 $0, a, c;
mul.rn.bf16x2 $1, b, c;
}""")


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """int32 [N, W] → [N, W, 2] of a 16-bit float type, the lower 16 bits first."""
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _in_order(zeroth, first, second, third, dtype: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """[N, K] from int32 [N, K / 8] in which codes i and i + 4 of each word are a pair of 16-bit floats."""
    even = tl.join(_halves(zeroth, dtype), _halves(second, dtype))
    odd = tl.join(_halves(first, dtype), _halves(third, dtype))
    return tl.reshape(tl.join(even, odd), (N, K))


@triton.jit
def _float_pair(words, UP: tl.constexpr, DOWN: tl.constexpr, DIGITS: tl.constexpr):
    """Moves two codes to the signs of two floats, and the last bit of each to the first of DIGITS mantissa bits."""
    signs = (words << UP) & -2147450880  # 0x80008000
    if UP > 13 - DIGITS:
        rest = words << (UP + DIGITS - 13)
    else:
        rest = words >> (13 - DIGITS - UP)
    return signs | (rest & DOWN)


@triton.jit
def float_numbers(words, dtype: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """[N, K] of bfloat16 or float16: the 4-bit floats (e2m1) of int32 [N, K / 8], divided by `float_unit`.

    Their two bits of exponent become the lowest ones of a wider exponent; what has an exponent of 0 is subnormal in
    both.
    """
    DIGITS: tl.constexpr = 7 if dtype == tl.bfloat16 else 10
    MASK: tl.constexpr = 0x01C001C0 if dtype == tl.bfloat16 else 0x0E000E00
    return _in_order(
        _float_pair(words, 12, MASK, DIGITS), _float_pair(words, 8, MASK, DIGITS),
        _float_pair(words, 4, MASK, DIGITS), _float_pair(words, 0, MASK, DIGITS), dtype, N, K,
    )  # fmt: skip


@triton.jit
def float_unit(dtype: tl.constexpr):
    """What `float_numbers` must be multiplied by: the difference of the two exponents' biases, float32 []."""
    return tl.full([], 2.0**126 if dtype == tl.bfloat16 else 2.0**14, tl.float32)


@triton.jit
def whole_numbers(words, zero, dtype: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr):
    """[N, K / SPAN, SPAN] of bfloat16 or float16: the codes from 0 to 15 of int32 [N, K / 8], less `zero`, exactly.

    A code takes the last bits of a float at which these are worth 1; `zero` broadcasts to the result.
    """
    ONES: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
    OFFSET: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    found = _in_order(
        (words & 0x000F000F) | ONES, ((words >> 4) & 0x000F000F) | ONES,
        ((words >> 8) & 0x000F000F) | ONES, ((words >> 12) & 0x000F000F) | ONES, dtype, N, K,
    )  # fmt: skip
    return tl.reshape(found, (N, K // SPAN, SPAN)) - (zero.to(tl.float32) + OFFSET).to(dtype)


@triton.jit
def as_factors(scales, EXPONENTS: tl.constexpr):
    """Scales in float32; EXPONENTS: uint8 that stand for two to the power of (scale - 127)."""
    if EXPONENTS:
        scales = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scales.to(tl.float32)
