"""The order in which programs should serve rows of unequal length, in Triton.

A device starts programs one after another, and the last ones run nearly alone: these should have the shortest rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained

_ROWS = 32


@triton.jit(do_not_specialize=["num_rows"])
def _longest_first(order, lengths, num_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """One program: finds the places of ROWS rows in the order, by counting the rows that come before each."""
    await_previous(CHAINED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(lengths + row, mask=row < num_rows, other=0)
    before = tl.zeros([ROWS], tl.int32)
    for first in range(0, num_rows, BLOCK):
        other = first + tl.arange(0, BLOCK)
        length = tl.load(lengths + other, mask=other < num_rows, other=-1)
        longer = length[None, :] > own[:, None]
        sooner = (length[None, :] == own[:, None]) & (other[None, :] < row[:, None])
        before += tl.sum((longer | sooner).to(tl.int32), 1)
    tl.store(order + before, row, mask=row < num_rows)


def longest_first(lengths: Tensor) -> Tensor:
    """The rows by `lengths` (int32 [B], none below 0), the longest first, equal ones in their order: int32 [B]."""
    order = torch.empty_like(lengths)
    if num_rows := len(lengths):
        _longest_first[(triton.cdiv(num_rows, _ROWS),)](
            order, lengths, num_rows, ROWS=_ROWS, BLOCK=256, **chained(lengths.device)
        )
    return order
