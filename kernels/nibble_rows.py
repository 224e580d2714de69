"""Products of up to 64 rows with weights of nibbles (`Nibbles`), which are read once and stored nowhere.

Such a product should take as long as reading the codes. For up to 16 rows a program computes 16 outputs, the rows of a
matrix instruction, and its warps divide the inputs among them, so that even small weights make enough programs; more
rows divide outputs and rows among warps. What a step reads is on its way while the one before is multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .nibbles import Nibbles, fits as groups_fit, nibble_weights, read_nibbles

#: The most rows; above, a weight that is put together once costs less than decoding it for each tile of rows.
FEW_ROWS = 64
#: Inputs of a part of a step, and the parts of a step for up to 16 rows.
DEPTH, _PARTS = 64, 4


@triton.jit(do_not_specialize=["rows"])
def _nibble_rows(
    x, low, high, scales, minima, outer, table, numbers, bias, out, rows, outputs, depth, groups, stride_x,
    GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, HIGH: tl.constexpr, MINIMA: tl.constexpr,
    OUTER: tl.constexpr, EXPONENTS: tl.constexpr, NUMBERS: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = PARTS * DEPTH
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, wide = column < outputs, column.to(tl.int64)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, PARTS)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    source = x + row.to(tl.int64)[None, None, :] * stride_x + lane[:, :, None]
    own = column.to(tl.float32)
    if NUMBERS:
        own = tl.load(numbers + column, mask=there, other=0.0)
    words, more, factors, least, outer_scale, outer_minimum = read_nibbles(
        low, high, scales, minima, outer, wide, there, 0, depth, groups, GROUP, SPAN, HIGH, MINIMA, OUTER, WIDTH
    )
    if PARTS == 1:  # one matrix, which warps divide
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:  # one for each warp
        acc = tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, depth, WIDTH):
        weight = nibble_weights(
            words, more, factors, least, outer_scale, outer_minimum, table, own,
            ZERO, HIGH, MINIMA, OUTER, EXPONENTS, NUMBERS, TABLE, SPAN, BLOCK_N, WIDTH,
        )  # fmt: skip
        words, more, factors, least, outer_scale, outer_minimum = read_nibbles(
            low, high, scales, minima, outer, wide, there, first + WIDTH, depth, groups,
            GROUP, SPAN, HIGH, MINIMA, OUTER, WIDTH,
        )  # fmt: skip
        kept = (row < rows)[None, None, :] & (first + lane < depth)[:, :, None]
        values = tl.load(source + first, mask=kept, other=0.0)
        weight = weight.to(values.dtype)
        if PARTS == 1:
            acc = tl.dot(weight, tl.reshape(values, (DEPTH, BLOCK_M)), acc, input_precision="ieee")
        else:
            parts = tl.permute(tl.reshape(weight, (BLOCK_N, PARTS, DEPTH)), (1, 0, 2))
            acc = tl.dot(parts, values, acc, input_precision="ieee")
    if PARTS == 1:
        total = acc
    else:
        total = tl.sum(acc, 0)
    if BIAS:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[:, None]
    at = out + row.to(tl.int64)[None, :] * outputs + column[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=there[:, None] & (row < rows)[None, :])


def fits(weight: Nibbles) -> bool:
    """Whether `product` takes the weight: its tensors are contiguous, and its groups fill steps or steps groups."""
    tensors = (tensor for tensor in weight.pointers if tensor is not None)
    whole = weight.depth % weight.scales.shape[-1] == 0 and all(tensor.is_contiguous() for tensor in tensors)
    return whole and groups_fit(weight.group, DEPTH) and groups_fit(weight.group, _PARTS * DEPTH)


def product(x: Tensor, weight: Nibbles, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x [rows, K], its columns contiguous, of a 16-bit type, and W [N, K] whose groups `fits`.

    Weights are rounded to x's type before they are multiplied, as where they are put together; sums are float32.
    """
    rows, depth = x.shape
    outputs, groups = weight.scales.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    few = rows <= 16
    block_m, block_n, parts = (16, 16, _PARTS) if few else (32 if rows <= 32 else 64, 32, 1)
    grid = (triton.cdiv(outputs, block_n), triton.cdiv(rows, block_m))
    _nibble_rows[grid](
        x, *weight.pointers, bias, out, rows, outputs, depth, groups, x.stride(0),
        **weight.sizes(parts * DEPTH), BIAS=bias is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, PARTS=parts, DEPTH=DEPTH, num_warps=4,
    )  # fmt: skip
    return out
