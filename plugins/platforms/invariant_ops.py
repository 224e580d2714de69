"""Ops on host memory that give a row the same bits whatever other rows stand beside it, and however many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from frame.interfaces import SILU, Gating
from frame.ops import NO_BIASES, ExpertBiases, gated

#: Rows of every product of `linear_invariant`.
TILE = 16


def linear_invariant(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, product: Callable[..., Tensor] = functional.linear
) -> Tensor:
    """x Wᵀ + b, the bits of a row being the same in any batch.

    Libraries choose how they sum by the number of rows, so each `product` here has `TILE` rows, filled up with zeros.
    It also takes a library that treats all rows of a product alike, which `rows_are_alike` finds out.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count % TILE:
        rows = torch.cat((rows, rows.new_zeros(-count % TILE, rows.shape[1])))
    rows = rows.contiguous()
    if not count:
        return product(x, weight, bias)
    parts = [product(tile, weight, bias) for tile in rows.split(TILE)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[:count].view(*x.shape[:-1], len(weight))


def rows_are_alike(
    dtype: torch.dtype, device: torch.device, product: Callable[[Tensor, Tensor], Tensor] = functional.linear
) -> bool:
    """Whether equal rows of one product get equal bits, tried with sizes that no library's blocks divide evenly."""
    for inputs, outputs in ((24, 40), (64, 256), (100, 333), (1000, 75)):
        draw = torch.Generator().manual_seed(inputs)
        weight = torch.randn(outputs, inputs, generator=draw).to(device, dtype)
        row = torch.randn(1, inputs, generator=draw).to(device, dtype)
        found = product(row.repeat(TILE, 1), weight)
        if not torch.equal(found, found[:1].expand_as(found)):
            return False
    return True


def each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for x [..., dim], computed one row at a time.

    Libraries compute the elements that fill no whole vector register with other instructions, and which elements these
    are depends on the number of rows; in a row alone they are always the same.
    """
    if not x.numel():
        return function(x)
    rows = x.reshape(-1, x.shape[-1])
    first = function(rows[:1])
    if len(rows) == 1:
        return first.view(*x.shape[:-1], first.shape[-1])
    out = torch.empty((len(rows), first.shape[-1]), dtype=first.dtype, device=first.device)
    out[:1] = first
    for row in range(1, len(rows)):
        out[row : row + 1] = function(rows[row : row + 1])
    return out.view(*x.shape[:-1], first.shape[-1])


def fused_experts_invariant(
    hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, *, first: int = 0,
    gating: Gating = SILU, biases: ExpertBiases = NO_BIASES,
) -> Tensor:  # fmt: skip
    """As `Ops.fused_experts`, the bits of a token being the same in any batch; experts are added by ascending id."""
    out, (inner_bias, outer_bias) = torch.zeros_like(hidden), biases
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(ids == expert + first)
        if token.numel() == 0:
            continue
        inner = linear_invariant(hidden[token], gate_up[expert], None if inner_bias is None else inner_bias[expert])
        bias = None if outer_bias is None else outer_bias[expert]
        value = linear_invariant(each_row(partial(gated, how=gating), inner), down[expert], bias)
        out.index_add_(0, token, value * weights[token, choice].unsqueeze(-1).to(value.dtype))
    return out
