"""Gated activations in Triton; the references are in `frame.core.ops.layers`. Memory-bound; one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained

_BLOCK = 1024


@triton.jit
def _logistic(x):
    """1 / (1 + exp(-x)) without overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """silu(gate) · up in float32, of sums that are rounded first, as products alone would be."""
    gate = gate.to(dtype).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)


@triton.jit
def _gated(x, out, size, stride, GELU: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = lane < size
    gate = tl.load(x + row * stride + lane, mask=kept, other=0.0)
    up = tl.load(x + row * stride + size + lane, mask=kept, other=0.0)
    wide = gate.to(tl.float32)
    if GELU:
        # (1 + tanh(y)) / 2 is the logistic function of 2y
        active = wide * _logistic(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    else:
        active = wide * _logistic(wide)
    tl.store(out + row * size + lane, active.to(gate.dtype) * up, mask=kept)


def silu_mul(x: Tensor) -> Tensor:
    """As `frame.core.ops.layers.silu_mul` for x [T, 2 · size], the last dimension contiguous."""
    return _launch(x, False)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """As `frame.core.ops.layers.gelu_tanh_mul` for x [T, 2 · size], the last dimension contiguous."""
    return _launch(x, True)


def _launch(x: Tensor, gelu: bool) -> Tensor:
    rows, size = x.shape[0], x.shape[-1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _gated[(rows, triton.cdiv(size, _BLOCK))](
            x, out, size, x.stride(0), GELU=gelu, BLOCK=_BLOCK, **chained(x.device)
        )  # fmt: skip
    return out
