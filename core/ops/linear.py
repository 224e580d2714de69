"""The product of a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows of every product of `linear_invariant`.
TILE = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x [..., in_features] and weight [out_features, in_features]."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, a row's bits being the same whatever rows stand beside it, and however many.

    Libraries choose how they sum by the number of rows, so every product here has `TILE` of them, the last ones zeros.
    That a row's place in a product is of no matter is asked of the library by `rows_are_alike`.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count % TILE:
        rows = torch.cat((rows, rows.new_zeros(-count % TILE, rows.shape[1])))
    rows = rows.contiguous()
    if not count:
        return linear(x, weight, bias)
    parts = [torch.nn.functional.linear(tile, weight, bias) for tile in rows.split(TILE)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[:count].view(*x.shape[:-1], len(weight))


def rows_are_alike(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether equal rows of one product have equal bits, in some sizes that fit no library's blocks evenly."""
    for inputs, outputs in ((24, 40), (64, 256), (100, 333), (1000, 75)):
        draw = torch.Generator().manual_seed(inputs)
        weight = torch.randn(outputs, inputs, generator=draw).to(device, dtype)
        row = torch.randn(1, inputs, generator=draw).to(device, dtype)
        found = linear(row.repeat(TILE, 1), weight)
        if not torch.equal(found, found[:1].expand_as(found)):
            return False
    return True
