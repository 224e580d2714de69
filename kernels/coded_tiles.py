"""Parts of kernels that multiply by codes: what is loaded of a tile of weights, and when its scales are applied.

Scales of SPAN columns multiply the weights (EARLY), those of a whole step or row the sums. Without groups (GROUP 0) a
row has one scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import as_factors, float_numbers, float_unit, whole_numbers
from .expert_tiles import product_of

#: What scales of 4-bit floats are divided by, and sums multiplied, so that the unit times a scale is a bfloat16.
_LATE = tl.constexpr(2.0**32)


@triton.jit
def ahead(stored, scale_at, there, first, depth, GROUP: tl.constexpr, SPAN: tl.constexpr, BLOCK_K: tl.constexpr):
    """[rows, BLOCK_K / SPAN]: scales or zeros of the columns from `first` on, loaded a step before they are used.

    The compiler brings forward large loads alone. Without groups there is nothing to load.
    """
    if GROUP:
        column = first + tl.arange(0, BLOCK_K // SPAN) * SPAN
        kept = there[:, None] & (column < depth)[None, :]
        found = tl.load(stored + scale_at[:, None] + (column // GROUP)[None, :], mask=kept, other=0.0)
    else:
        found = there[:, None]
    return found


@triton.jit
def numbers_of(
    at, own, zero, there, first, depth,
    KIND: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr, EXPONENTS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of `dtype`: the weights from column `first` on, whose codes lie at `at`.

    They are EARLY to be multiplied by the scales `own` [BLOCK_N, BLOCK_K / SPAN].
    """
    if KIND == "bytes":
        lane = first + tl.arange(0, BLOCK_K)
        codes = tl.load(at) if EVEN else tl.load(at, mask=there[:, None] & (lane < depth)[None, :], other=0.0)
        if (
            codes.dtype.is_fp8() and dtype == tl.bfloat16
        ):  # one instruction makes it of a float16, at a quarter of the rate
            codes = codes.to(tl.float16).to(tl.float32)
        found = codes.to(dtype)
    else:
        word = first // 8 + tl.arange(0, BLOCK_K // 8)
        words = tl.load(at) if EVEN else tl.load(at, mask=there[:, None] & (word < depth // 8)[None, :], other=0)
        if KIND == "float4":
            found = tl.reshape(float_numbers(words, dtype, BLOCK_N, BLOCK_K), (BLOCK_N, BLOCK_K // SPAN, SPAN))
        else:
            found = whole_numbers(words, zero[:, :, None], dtype, BLOCK_N, BLOCK_K, SPAN)
        if EARLY:
            scale = as_factors(own, EXPONENTS)[:, :, None]
            if KIND == "float4" and dtype == tl.bfloat16:
                # exact: of the 8 bits of such a number codes need 2, and scales 4 at most
                found *= (scale * (float_unit(dtype) / _LATE)).to(dtype)
            else:
                if KIND == "float4":
                    scale *= float_unit(dtype)
                found = (found.to(tl.float32) * scale).to(dtype)
        found = tl.reshape(found, (BLOCK_N, BLOCK_K))
    return found


@triton.jit
def add_step(
    a, w, acc, own, x_own, EARLY: tl.constexpr, GROUP: tl.constexpr, ROUNDED: tl.constexpr, X_GROUP: tl.constexpr,
    EXPONENTS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """acc + a wᵀ, or its transpose; the scales of a step multiply its sums.

    The matrix unit adds up products of 8-bit floats less exactly than in float32, so sums of a step stay apart.
    """
    if EARLY or not (GROUP or ROUNDED):
        acc = product_of(a, w, acc, SWAP)
    else:
        part = product_of(a, w, tl.zeros_like(acc), SWAP)
        if GROUP:
            scale = as_factors(own, EXPONENTS)  # [columns, 1]
            part *= scale if SWAP else tl.trans(scale)
        if X_GROUP:
            part *= x_own[None, :] if SWAP else x_own[:, None]
        acc += part
    return acc


@triton.jit
def scale_sums(
    acc, x, scales, numbers, x_scales, scale_at, line, row, there, KIND: tl.constexpr,
    GROUP: tl.constexpr, ROUNDED: tl.constexpr, X_GROUP: tl.constexpr, NUMBERS: tl.constexpr,
    EXPONENTS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """The sums over all steps, times what has one scale for a whole row of the weight, or of x."""
    if not GROUP:
        own = as_factors(tl.load(scales + scale_at, mask=there, other=0.0), EXPONENTS)
        acc *= own[:, None] if SWAP else own[None, :]
    if NUMBERS:
        own = tl.load(numbers + line, mask=there, other=0.0)
        acc *= own[:, None] if SWAP else own[None, :]
    if ROUNDED and not X_GROUP:
        own = tl.load(x_scales + row)
        acc *= own[None, :] if SWAP else own[:, None]
    if KIND == "float4" and x.dtype.element_ty == tl.bfloat16:
        acc *= _LATE
    return acc


@triton.jit
def zeros_of(zeros, scale_at, there, first, depth, KIND: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
           SPAN: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """As `ahead`; 8 where none are stored, and those of the whole row where it has no groups."""
    if ZEROS and GROUP:
        found = ahead(zeros, scale_at, there, first, depth, GROUP, SPAN, BLOCK_K)
    elif ZEROS:
        found = tl.load(zeros + scale_at, mask=there, other=0)[:, None]
    else:
        found = tl.full([1, 1], 8, tl.uint8)
    return found
