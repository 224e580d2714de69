"""Root-mean-square normalisation in Triton; the references are in `frame.core.ops.layers`.

One program normalises one row. Statistics are float32, and values are rounded where the reference rounds them, so that
results are equal. Each value is read and written once, which is what the time goes to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained


@triton.jit
def normalized(value, gain, dim, eps, offset, OFFSET: tl.constexpr):
    """The normalised row, rounded where the reference rounds."""
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / dim + eps)
    if OFFSET:
        row = (wide * (gain.to(tl.float32) + offset)).to(value.dtype)
    else:
        row = gain * wide.to(value.dtype)
    return row


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, eps, offset,
    heads, stride_token, stride_head, dim,
    DIM: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, DIM)
    kept = lane < dim
    scale = tl.load(weight + lane, mask=kept, other=0.0)
    await_previous(CHAINED)
    start = (row // heads) * stride_token + (row % heads) * stride_head
    value = tl.load(x + start + lane, mask=kept, other=0.0)
    if ADD:
        value = value + tl.load(residual + row * dim + lane, mask=kept, other=0.0)
        tl.store(total + row * dim + lane, value, mask=kept)
    tl.store(out + row * dim + lane, normalized(value, scale, dim, eps, offset, OFFSET), mask=kept)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """As `frame.core.ops.layers.rms_norm` for x [T, dim] or [T, heads, dim], the last dimension contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    _launch(x, None, weight, out, None, eps, offset, heads)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """As `frame.core.ops.layers.add_rms_norm` for contiguous [T, dim]."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps, offset, 1)
    return out, total


def _launch(x, residual, weight, out, total, eps, offset, heads):
    dim = x.shape[-1]
    rows = x.numel() // dim
    if not rows:
        return
    size = triton.next_power_of_2(dim)
    _rms_norm[(rows,)](
        x, residual, weight, out, total, eps, offset,
        heads, x.stride(0), x.stride(1) if x.dim() == 3 else 0, dim,
        DIM=size, ADD=residual is not None, OFFSET=offset != 0.0, num_warps=min(8, max(1, size // 512)),
        **chained(x.device),
    )  # fmt: skip
