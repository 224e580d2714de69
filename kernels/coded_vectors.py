"""Matrix-vector products of few pairs with experts whose weights are nibbles, in Triton; for `coded_experts`.

A token's pairs are multiplied one by one on the ordinary units, in float32, so that a program is a few rows of weights
that are read at once, 16 bytes a thread, and nothing changes its layout. A code becomes a float32 by a multiplication
that copies its sign and its other bits to their places; scales multiply the sums of the columns that share them. A
chip does half as many shifts and masks in a time as multiplications, so that these are what the products are bound by.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained
from .codes import as_factors
from .expert_launch import Tile
from .gating import SILU, Gating, constants, gate_alone, gate_times

#: Columns that are summed up before a scale multiplies them, at most: four words, which a thread reads at once.
_SPAN = 32
#: What x is multiplied by, so that products with 4-bit floats, whose exponents are not moved, are no subnormal numbers.
_RAISE = tl.constexpr(2.0**64)
#: What sums of such products are multiplied by: the rest of the difference of the two exponents' biases.
_REST = tl.constexpr(2.0**62)


class _Weights(Protocol):
    """As `coded_experts.Weights`, what of it is read here."""

    @property
    def codes(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor: ...
    @property
    def zeros(self) -> Tensor | None: ...
    @property
    def numbers(self) -> Tensor | None: ...
    @property
    def columns(self) -> slice | None: ...
    @property
    def is_float4(self) -> bool: ...


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """float32 of the lower and of the upper of two 16-bit floats in each word."""
    if dtype == tl.bfloat16:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _two_numbers(words, PLACE: tl.constexpr, KIND: tl.constexpr):
    """float32 of codes PLACE and PLACE + 4 of each word: 4-bit floats times 2 ** -126, or whole numbers."""
    if PLACE >= 2:
        words = words >> 8
    SHIFT: tl.constexpr = 4 * (PLACE % 2)
    if KIND == "float4":
        both = words & (0x000F000F << SHIFT)
        # 0x81C00000: the sign, and the ends of exponent and mantissa
        low = (both * ((1 << (28 - SHIFT)) + (1 << (22 - SHIFT)))) & -2118123520
        high = (both * ((1 << (12 - SHIFT)) + (1 << (6 - SHIFT)))) & -2118123520
        low = low.to(tl.float32, bitcast=True)
        high = high.to(tl.float32, bitcast=True)
    else:
        # a code is put into the mantissa of a number whose bit there is worth 1
        low = (words & (15 << SHIFT)) | ((150 - SHIFT) << 23)
        high = ((words >> 16) & (15 << SHIFT)) | ((150 - SHIFT) << 23)
        low = low.to(tl.float32, bitcast=True) - 2.0 ** (23 - SHIFT)
        high = high.to(tl.float32, bitcast=True) - 2.0 ** (23 - SHIFT)
    return low, high


@triton.jit
def _rows_times(
    words, factor, zero, values, KIND: tl.constexpr, ZEROS: tl.constexpr
):  # fmt: skip
    """[N, G]: sums of the products of rows with eight `values` [G, W] of each word, times the scales of G groups."""
    x0, x1, x2, x3, x4, x5, x6, x7 = values
    w0, w4 = _two_numbers(words, 0, KIND)
    w1, w5 = _two_numbers(words, 1, KIND)
    w2, w6 = _two_numbers(words, 2, KIND)
    w3, w7 = _two_numbers(words, 3, KIND)
    part = w0 * x0[None]
    part += w1 * x1[None]
    part += w2 * x2[None]
    part += w3 * x3[None]
    part += w4 * x4[None]
    part += w5 * x5[None]
    part += w6 * x6[None]
    part += w7 * x7[None]
    total = tl.sum(part, 2)
    if KIND != "float4":
        every = tl.sum(x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7, 1)
        if ZEROS:
            total -= zero.to(tl.float32) * every[None]
        else:
            total -= 8.0 * every[None]
    return total * factor


@triton.jit
def _values_of(x, chunk, kept, share, dtype: tl.constexpr, SPAN: tl.constexpr, RAISED: tl.constexpr):
    """float32 [G, SPAN / 8] eight times: what words of G chunks multiply, in the order of their codes."""
    at = x + chunk[:, None] * (SPAN // 2) + (tl.arange(0, SPAN // 8) * 4)[None]
    if RAISED:
        share = share * _RAISE
    x0, x1 = _halves(tl.load(at, mask=kept[:, None], other=0), dtype)
    x2, x3 = _halves(tl.load(at + 1, mask=kept[:, None], other=0), dtype)
    x4, x5 = _halves(tl.load(at + 2, mask=kept[:, None], other=0), dtype)
    x6, x7 = _halves(tl.load(at + 3, mask=kept[:, None], other=0), dtype)
    return x0 * share, x1 * share, x2 * share, x3 * share, x4 * share, x5 * share, x6 * share, x7 * share


@triton.jit
def _load(codes, scales, zeros, line, groups, chunk, kept, DEPTH: tl.constexpr, GROUP: tl.constexpr,
          SPAN: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Words [N, G, SPAN / 8], and scales and zeros [N, G], of rows and chunks of SPAN columns."""
    word = chunk[:, None] * (SPAN // 8) + tl.arange(0, SPAN // 8)[None]
    words = tl.load(codes + line[:, None, None] * (DEPTH // 8) + word[None], mask=kept[None, :, None], other=0)
    place = line[:, None] * groups + (chunk * SPAN // GROUP)[None]
    own = tl.load(scales + place, mask=kept[None], other=0.0)
    zero = own
    if ZEROS:
        zero = tl.load(zeros + place, mask=kept[None], other=0)
    return words, own, zero


@triton.jit(do_not_specialize=["first"])
def _coded_vector_gate_up(
    x, weight, bias, ids, out, experts, first, size, stride_x, groups,
    DEPTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
    GROUP: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, NUMBERS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of one pair. The next kernel, `_coded_vector_down`, may read `ids` as it begins."""
    await_previous(CHAINED, True)
    codes, scales, zeros, numbers = weight
    pair = tl.program_id(1).to(tl.int64)
    expert = (tl.load(ids + pair) - first).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.where(column < size, column, 0)
    own_line = expert * (2 if GATED else 1) * size
    line = own_line + inside
    row = x + pair // TOP_K * stride_x
    gate = tl.zeros([BLOCK_N, BLOCK_K // SPAN], tl.float32)
    up = gate
    for at in tl.static_range(0, DEPTH, BLOCK_K):
        chunk = at // SPAN + tl.arange(0, BLOCK_K // SPAN)
        kept = chunk < DEPTH // SPAN
        words, own, zero = _load(codes, scales, zeros, line, groups, chunk, kept, DEPTH, GROUP, SPAN, ZEROS)
        if GATED:
            more, up_own, up_zero = _load(
                codes, scales, zeros, line + size, groups, chunk, kept, DEPTH, GROUP, SPAN, ZEROS
            )
        values = _values_of(row, chunk, kept, 1.0, out.dtype.element_ty, SPAN, KIND == "float4")
        gate += _rows_times(words, as_factors(own, EXPONENTS), zero, values, KIND, ZEROS)
        if GATED:
            up += _rows_times(more, as_factors(up_own, EXPONENTS), up_zero, values, KIND, ZEROS)
    value = tl.sum(gate, 1)
    if KIND == "float4":
        value *= _REST
    if NUMBERS:
        value *= tl.load(numbers + line)
    if BIASED:
        value += tl.load(bias + line).to(tl.float32)
    if GATED:
        other = tl.sum(up, 1)
        if KIND == "float4":
            other *= _REST
        if NUMBERS:
            other *= tl.load(numbers + line + size)
        if BIASED:
            other += tl.load(bias + line + size).to(tl.float32)
        value = gate_times(value, other, FUNCTION, ALPHA, SHIFT, LIMIT)
    else:
        value = gate_alone(value, FUNCTION, ALPHA, LIMIT)
    tl.store(out + pair * size + column, value.to(out.dtype.element_ty), mask=column < size)


@triton.jit(do_not_specialize=["first"])
def _coded_vector_down(
    x, weight, bias, ids, weights, out, experts, first, size, groups,
    DEPTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
    GROUP: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, NUMBERS: tl.constexpr,
    EXPONENTS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of one token, summed over its experts."""
    await_previous(CHAINED)
    codes, scales, zeros, numbers = weight
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.where(column < size, column, 0)
    acc = tl.zeros([BLOCK_N, BLOCK_K // SPAN], tl.float32)
    extra = tl.zeros([BLOCK_N], tl.float32)
    for k in range(TOP_K):  # in turn: the code of all experts would be more than the instruction cache holds
        pair = token * TOP_K + k
        expert = (tl.load(ids + pair) - first).to(tl.int64)
        held = (expert >= 0) & (expert < experts)
        share = tl.where(held, tl.load(weights + pair), 0.0)
        line = tl.where(held, expert, 0) * size + inside
        if NUMBERS:
            number = tl.load(numbers + line)
        for at in tl.static_range(0, DEPTH, BLOCK_K):
            chunk = at // SPAN + tl.arange(0, BLOCK_K // SPAN)
            kept = (chunk < DEPTH // SPAN) & held
            words, own, zero = _load(codes, scales, zeros, line, groups, chunk, kept, DEPTH, GROUP, SPAN, ZEROS)
            values = _values_of(x + pair * (DEPTH // 2), chunk, kept, share, out.dtype.element_ty, SPAN,
                                KIND == "float4")  # fmt: skip
            factor = as_factors(own, EXPONENTS)
            if NUMBERS:
                factor *= number[:, None]
            acc += _rows_times(words, factor, zero, values, KIND, ZEROS)
        if BIASED:
            extra += share * tl.load(bias + line, mask=(column < size) & held, other=0.0).to(tl.float32)
    total = tl.sum(acc, 1)
    if KIND == "float4":
        total *= _REST
    total += extra
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


def fits(x: Tensor, weight: _Weights) -> bool:
    """Whether the kernels take a weight, whole, and rows of x whose numbers are read two at a time."""
    codes, groups = weight.codes, weight.scales.shape[2]
    depth = codes.shape[2] * 8
    if codes.dtype != torch.int32 or weight.scales.shape[1] != codes.shape[1] or weight.columns is not None:
        return False
    group = depth // groups
    return (
        depth % _SPAN == 0
        and group % 8 == 0
        and (group % _SPAN == 0 or _SPAN % group == 0)
        and x.stride(0) % 2 == 0
        and (x.storage_offset() % 2 == 0)
    )


def gate_up(
    hidden: Tensor, weight: _Weights, ids: Tensor, tile: Tile, first: int = 0, gating: Gating | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `experts.vector_gate_up`, of a weight that `fits` takes."""
    gating = gating or SILU
    size = weight.codes.shape[1] // (2 if gating.gated else 1)
    out = torch.empty((ids.numel(), size), dtype=hidden.dtype, device=hidden.device)
    _coded_vector_gate_up[(triton.cdiv(size, tile.block_n), ids.numel())](
        hidden.view(torch.int32), _tensors(weight), out if bias is None else bias, ids, out, len(weight.codes), first,
        size, hidden.stride(0) // 2, weight.scales.shape[2],
        TOP_K=ids.shape[1], GATED=gating.gated, BIASED=bias is not None, **_sizes(weight, tile), **constants(gating),
        **chained(hidden.device),
    )  # fmt: skip
    return out


def down(
    inner: Tensor, weight: _Weights, weights: Tensor, ids: Tensor, tile: Tile, first: int = 0,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `experts.vector_down`, of a weight that `fits` takes."""
    tokens, size = ids.shape[0], weight.codes.shape[1]
    out = torch.empty((tokens, size), dtype=inner.dtype, device=inner.device)
    _coded_vector_down[(triton.cdiv(size, tile.block_n), tokens)](
        inner.view(torch.int32), _tensors(weight), out if bias is None else bias, ids, weights, out, len(weight.codes),
        first, size, weight.scales.shape[2],
        TOP_K=ids.shape[1], BIASED=bias is not None, **_sizes(weight, tile), **chained(inner.device),
    )  # fmt: skip
    return out


def _tensors(weight: _Weights) -> tuple[Tensor, ...]:
    absent = weight.codes
    return (weight.codes, weight.scales, *(absent if one is None else one for one in (weight.zeros, weight.numbers)))


def _sizes(weight: _Weights, tile: Tile) -> dict[str, Any]:
    """What the kernels are compiled for."""
    depth = weight.codes.shape[2] * 8
    group = depth // weight.scales.shape[2]
    return {
        "DEPTH": depth, "GROUP": group, "SPAN": min(group, _SPAN), "BLOCK_N": tile.block_n,
        "BLOCK_K": max(tile.block_k, _SPAN), "KIND": "float4" if weight.is_float4 else "nibbles",
        "ZEROS": weight.zeros is not None, "NUMBERS": weight.numbers is not None,
        "EXPONENTS": weight.scales.dtype == torch.uint8, "num_warps": tile.num_warps,
    }  # fmt: skip
