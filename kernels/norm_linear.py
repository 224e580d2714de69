"""The norm of one row and the product that reads it, in one Triton kernel; the reference is `Ops.norm_linear`.

A decode step of one row is a chain of short kernels, and a norm is the shortest of them. Here every program of the
product computes the whole norm itself while its part of the weight is on the way, so that the norm takes no time of its
own and one launch less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import silu_times
from .chain import await_previous, chained
from .norm import normalized

#: (weight, eps, offset) of `rms_norm`.
Norm = tuple[Tensor, float, float]
#: The longest row: a program holds it whole.
MAX_INPUTS = 8192


@triton.jit
def _norm_linear(
    x, residual, norm, weight, stride_weight, bias, out, normed, total, outputs, inputs,
    OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs. If `normed` is None, outputs are gated: their factors are computed here too."""
    scale, eps, offset = norm
    GATED: tl.constexpr = normed is None
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    there, kept = output < outputs, lane < inputs
    mask = there[:, None] & kept[None, :]
    rows = tl.load(weight + output.to(tl.int64)[:, None] * stride_weight + lane[None, :], mask=mask, other=0.0)
    if GATED:
        second = (output + outputs).to(tl.int64)
        factors = tl.load(weight + second[:, None] * stride_weight + lane[None, :], mask=mask, other=0.0)
    gain = tl.load(scale + lane, mask=kept, other=0.0)
    await_previous(CHAINED)
    value = tl.load(x + lane, mask=kept, other=0.0) + tl.load(residual + lane, mask=kept, other=0.0)
    row = normalized(value, gain, inputs, eps, offset, OFFSET)
    if tl.program_id(0) == 0:
        tl.store(total + lane, value, mask=kept)
        if not GATED:
            tl.store(normed + lane, row, mask=kept)
    row = row.to(tl.float32)[None, :]
    sums = tl.sum(rows.to(tl.float32) * row, 1)
    if bias is not None:
        sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    if GATED:
        ups = tl.sum(factors.to(tl.float32) * row, 1)
        if bias is not None:
            ups += tl.load(bias + outputs + output, mask=there, other=0.0).to(tl.float32)
        sums = silu_times(sums, ups, out.dtype.element_ty)
    tl.store(out + output, sums, mask=there)


def tile(inputs: int, *, gated: bool = False) -> tuple[int, int, int]:
    """(outputs of a program, inputs of its tile, warps), as measured in chains of products on an H200."""
    block_k = triton.next_power_of_2(inputs)
    rows, warps = (2, 4) if block_k == 2048 else (4, max(2, block_k // 1024))
    return rows // 2 if gated else rows, block_k, warps


def norm_linear(
    x: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed Wᵀ + b, normed, x + residual) of one row x [1, inputs]; weight [outputs, inputs], rows contiguous."""
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, norm, weight, bias, out, normed, total)
    return out, normed, total


def norm_linear_silu_mul(
    x: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(silu(a) · b of the halves a, b of normed Wᵀ + b, x + residual); weight [2 · size, inputs]."""
    out = torch.empty((1, weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x)
    _launch(x, residual, norm, weight, bias, out, None, total)
    return out, total


def _launch(x, residual, norm, weight, bias, out, normed, total):
    outputs = out.shape[1]
    block_n, block_k, warps = tile(x.shape[1], gated=normed is None)
    _norm_linear[(triton.cdiv(outputs, block_n),)](
        x, residual, norm, weight, weight.stride(0), bias, out, normed, total, outputs, x.shape[1],
        OFFSET=norm[2] != 0.0, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, **chained(x.device),
    )  # fmt: skip
