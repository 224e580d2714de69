"""Biases of scores that depend on the distance from a query to a key, a table of them for each head (T5).

Knows no row and no cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .own_rows import Attend
from .paging import TILE


def biased(table: Tensor, distance: Tensor, dtype: torch.dtype) -> Tensor:
    """[H, queries, keys] for `distance` [queries, keys], key position - query position; `table` [H, 2 N + 1]."""
    reach = table.shape[1] // 2
    return table.to(dtype)[:, distance.clamp(-reach, reach) + reach]


def own_biased(
    attend: Attend, table: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """`attend` of rows over themselves, with biases, in tiles of queries so that no mask is wider than these."""
    del mask  # rows without a window have none
    length, parts = query.shape[2], list[Tensor]()
    places = torch.arange(length, device=query.device)
    for first in range(0, length, TILE):
        last = min(first + TILE, length)
        bias = biased(table, places[None, :] - places[first:last, None], query.dtype)
        parts.append(attend(query[:, :, first:last], keys, values, bias[None]))
    return torch.cat(parts, dim=2)
