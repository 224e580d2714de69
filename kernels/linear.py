"""Products of one row with a weight, in Triton; the reference is in `frame.core.ops.layers`.

With one row, a product takes as long as reading the weight once. Each program computes some outputs and reads the
weight's rows for them from begin to end, so that an output is always summed in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import silu_times
from .chain import await_previous, chained


@triton.jit
def _one_row(
    x, weight, bias, out, outputs, inputs, stride_weight,
    BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    there = output < outputs
    source = weight + output.to(tl.int64)[:, None] * stride_weight + lane[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ahead = tl.load(source, mask=there[:, None] & (lane < inputs)[None, :], other=0.0)
    await_previous(CHAINED)
    for first in range(0, inputs, BLOCK_K):
        values = ahead.to(tl.float32)
        left = first + BLOCK_K + lane < inputs
        ahead = tl.load(source + first + BLOCK_K, mask=there[:, None] & left[None, :], other=0.0)
        sums += values * tl.load(x + first + lane, mask=first + lane < inputs, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if BIAS:
        total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + output, total, mask=there)


@triton.jit
def _one_row_gated(
    x, weight, bias, out, outputs, inputs, stride_weight,
    BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    there = output < outputs
    source = weight + output.to(tl.int64)[:, None] * stride_weight + lane[None, :]
    second = weight + (output + outputs).to(tl.int64)[:, None] * stride_weight + lane[None, :]
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = gates
    mask = there[:, None] & (lane < inputs)[None, :]
    gate_ahead = tl.load(source, mask=mask, other=0.0)
    up_ahead = tl.load(second, mask=mask, other=0.0)
    await_previous(CHAINED)
    for first in range(0, inputs, BLOCK_K):
        gate_weight, up_weight = gate_ahead.to(tl.float32), up_ahead.to(tl.float32)
        mask = there[:, None] & (first + BLOCK_K + lane < inputs)[None, :]
        gate_ahead = tl.load(source + first + BLOCK_K, mask=mask, other=0.0)
        up_ahead = tl.load(second + first + BLOCK_K, mask=mask, other=0.0)
        value = tl.load(x + first + lane, mask=first + lane < inputs, other=0.0).to(tl.float32)[None, :]
        gates += gate_weight * value
        ups += up_weight * value
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if BIAS:
        gate += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
        up += tl.load(bias + outputs + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + output, silu_times(gate, up, out.dtype.element_ty), mask=there)


#: (outputs of a program, inputs of a tile, warps) that read most weights fastest on an H200.
TILE, GATED_TILE = (2, 2048, 2), (2, 1024, 2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, sizes: tuple[int, int, int] | None = None) -> Tensor:
    """x Wᵀ + b for one row x [1, inputs] and weight [outputs, inputs], rows contiguous; sums in float32.

    `sizes` are those of `TILE`, for measurements.
    """
    inputs, outputs = x.shape[1], weight.shape[0]
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    block_n, block_k, warps = sizes or TILE
    block_k = min(block_k, triton.next_power_of_2(inputs))
    _one_row[(triton.cdiv(outputs, block_n),)](
        x, weight, bias, out, outputs, inputs, weight.stride(0),
        BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
        **chained(x.device),
    )  # fmt: skip
    return out


def linear_silu_mul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, sizes: tuple[int, int, int] | None = None
) -> Tensor:
    """silu(a) · b of the halves a, b of x Wᵀ + b for one row x [1, inputs] and weight [2 · size, inputs].

    `sizes` are those of `GATED_TILE`, for measurements.
    """
    inputs, outputs = x.shape[1], weight.shape[0] // 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    block_n, block_k, warps = sizes or GATED_TILE
    block_n, block_k = max(1, block_n // 2), min(block_k, triton.next_power_of_2(inputs))
    _one_row_gated[(triton.cdiv(outputs, block_n),)](
        x, weight, bias, out, outputs, inputs, weight.stride(0),
        BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
        **chained(x.device),
    )  # fmt: skip
    return out
