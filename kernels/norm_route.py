"""The norm of one row, a router's product and its choice of experts, in one Triton kernel; the reference is
`Ops.norm_route`.

A step of one row waits for its experts: nothing of them can be read before they are chosen. Here the program that ends
last chooses, from the logits that all programs left, in the place of a launch that follows them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained
from .coded_rows import arrivals
from .norm import normalized
from .norm_linear import Norm, tile
from .routing import choose_best, router_constants


@triton.jit
def _norm_route(
    x, residual, norm, weight, stride_weight, bias, logits, arrived, normed, total, chosen, experts, inputs,
    OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
    TOP_K: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    EXPERTS: tl.constexpr, LEAST: tl.constexpr, MIXER: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N logits, and the choice if it is the last."""
    gains, eps, offset = norm
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    there, kept = output < experts, lane < inputs
    source = weight + output.to(tl.int64)[:, None] * stride_weight + lane[None, :]
    rows = tl.load(source, mask=there[:, None] & kept[None, :], other=0.0)
    gain = tl.load(gains + lane, mask=kept, other=0.0)
    await_previous(CHAINED)
    value = tl.load(x + lane, mask=kept, other=0.0) + tl.load(residual + lane, mask=kept, other=0.0)
    row = normalized(value, gain, inputs, eps, offset, OFFSET)
    if tl.program_id(0) == 0:
        tl.store(total + lane, value, mask=kept)
        tl.store(normed + lane, row, mask=kept)
    sums = tl.sum(rows.to(tl.float32) * row.to(tl.float32)[None, :], 1)
    if bias is not None:
        sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    tl.store(logits + output, sums, mask=there)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        correction, weights, ids, scale, least_sum, reach = chosen
        each = tl.arange(0, EXPERTS)
        known = tl.load(logits + each, mask=each < experts, other=-float("inf"), cache_modifier=".cg")
        choose_best(
            known.to(tl.float32), 0, each, correction, weights, ids, experts, scale, least_sum, reach,
            TOP_K, NORM, SIGMOID, BIASED, GROUPS, GROUP, TOP_GROUPS, TOP2, LEAST, MIXER,
        )  # fmt: skip
        tl.store(arrived, 0)  # for the next launch


def norm_route(
    x: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, spec: Any,
    correction: Tensor | None = None, sizes: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `Ops.norm_route` for one row x [1, inputs] and weight [experts, inputs], rows contiguous.

    `sizes` are outputs of a program and warps, for measurements. Launches that share a device must follow one another.
    """
    experts, inputs = weight.shape
    logits = torch.empty((1, experts), dtype=x.dtype, device=x.device)
    normed, total = torch.empty_like(x), torch.empty_like(x)
    weights = torch.empty((1, spec.top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty((1, spec.top_k), dtype=torch.int32, device=x.device)
    block_n, block_k, warps = tile(inputs)
    block_n, warps = sizes or (block_n, warps)
    chosen = (logits if correction is None else correction, weights, ids, float(spec.scale), float(spec.least_sum))
    _norm_route[(triton.cdiv(experts, block_n),)](
        x, residual, norm, weight, weight.stride(0), bias, logits, arrivals(x.device, 1), normed, total,
        (*chosen, 2.0 * spec.jitter), experts, inputs,
        OFFSET=norm[2] != 0.0, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
        **router_constants(spec, biased=correction is not None), **chained(x.device),
    )  # fmt: skip
    return weights, ids, normed, total
