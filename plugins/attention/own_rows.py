"""Attention of rows over their own tokens, in both directions and without a cache: what encoders do.

Rows of equal length are attended in one call, so nothing is padded and nothing masked. Knows no paging.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import GroupBatch

from .paging import TILE

#: (query [n, H, L, D], keys and values [n, Hk, L, D], mask) → [n, H, L, D]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass
class EqualRows:
    """`count` rows of `length` tokens each, one after the other from `start` on, or where `tokens` int64 lists them."""

    count: int
    length: int
    start: int
    tokens: Tensor | None


@dataclass
class OwnRows:
    """The rows of a step; together they hold every token unless there is padding."""

    groups: list[EqualRows]
    covers_all: bool
    window: int = 0

    def attend(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, H, D], key and value [T, Hk, D] → [T, H, D]."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if not self.covers_all:
            out.zero_()
        for group in self.groups:
            rows = _rows(query, group), _rows(key, group), _rows(value, group)
            if self.window and group.length > self.window:
                found = _windowed(attend, *rows, self.window).transpose(1, 2)
            else:
                found = attend(*rows, None).transpose(1, 2)
            if group.tokens is None:
                out[group.start : group.start + group.count * group.length].view(found.shape).copy_(found)
            else:
                out.index_copy_(0, group.tokens, found.reshape(-1, *out.shape[1:]))
        return out


def _rows(x: Tensor, group: EqualRows) -> Tensor:
    """[count, heads, length, D] of x [T, heads, D]."""
    if group.tokens is None:
        rows = x[group.start : group.start + group.count * group.length]
    else:
        rows = x.index_select(0, group.tokens)
    return rows.view(group.count, group.length, *x.shape[1:]).transpose(1, 2)


def _windowed(attend: Attend, query: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """`attend` in tiles of queries, each with the keys that its window reaches: those less than `window` away."""
    length, parts = query.shape[2], list[Tensor]()
    places = torch.arange(length, device=query.device)
    for first in range(0, length, TILE):
        last = min(first + TILE, length)
        reach = slice(max(0, first - window + 1), min(length, last + window - 1))
        hidden = (places[first:last, None] - places[None, reach]).abs() >= window
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
        parts.append(attend(query[:, :, first:last], keys[:, :, reach], values[:, :, reach], mask))
    return torch.cat(parts, dim=2)


def own_rows(batch: GroupBatch, *, alone: bool, window: int = 0) -> OwnRows:
    """Groups the rows of a batch by length; with `alone` each row has its own call, so that its bits are its own.

    With a `window` a token sees those that are less than so many tokens before or behind it.
    """
    lengths = batch.host_query_lens
    starts = lengths.cumsum(dtype=np.int64) - lengths
    live = np.flatnonzero(lengths)
    groups = []
    order = live[np.argsort(lengths[live], kind="stable")]
    borders = np.arange(1, len(order)) if alone else np.flatnonzero(np.diff(lengths[order])) + 1
    for rows in np.split(order, borders) if len(order) else ():
        count, length, start = len(rows), int(lengths[rows[0]]), int(starts[rows[0]])
        tokens = None
        if int(starts[rows[-1]]) != start + (count - 1) * length:
            listed = (starts[rows][:, None] + np.arange(length)).ravel()
            tokens = torch.from_numpy(listed).to(batch.query_start.device)
        groups.append(EqualRows(count, length, start, tokens))
    return OwnRows(groups, int(lengths.sum()) == batch.num_tokens, window)
