"""Functions of rows that are no op of their own: activations and caps that one family of models has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def map_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for an elementwise function, or one along the last dimension, of x [..., dim]."""
    return function(x)


def each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`map_rows` a row at a time.

    Libraries compute the elements left over by their vectors in another way, and which those are follows from the
    number of rows; a row alone always has the same ones.
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
