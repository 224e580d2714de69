"""Attention whose bits depend only on a token's own row: tiles at absolute positions, one row at a time.

A query at position p is computed in the tile p // TILE, at place p % TILE, against the keys from a fixed position to
the tile's end; missing queries are zeros and missing keys are hidden. Every matrix product has a shape that follows
from p alone, so neither the batch nor the way a prompt was cut into chunks changes a bit. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import LayerParams
from frame.ops import dequantize_kv

from .paging import StepRows, row_slots

TILE = 16


@dataclass
class InvariantTile:
    """Queries [`first`, `last`) of the batch at places [`place`, …) of one tile over the cached tokens `slots` [L].

    `distance` [TILE, L]: key position - query position; `hidden` where a query may not look.
    """

    first: int
    last: int
    place: int
    slots: Tensor
    distance: Tensor
    hidden: Tensor


@dataclass
class InvariantRow:
    """One row of a deterministic step."""

    tiles: list[InvariantTile]

    def attend(self, layer: LayerParams, query: Tensor, gather: Callable[[Tensor], Tensor], out: Tensor) -> None:
        """Fills this row's part of `out` [T, H, D]; `gather(slots [L])` gives keys and values [L, 2, Hk, D]."""
        for tile in self.tiles:
            out[tile.first : tile.last] = _attend(layer, query[tile.first : tile.last], gather(tile.slots), tile)


def invariant_row(rows: StepRows, row: int, window: int, block_size: int, device: torch.device) -> InvariantRow:
    """Cuts row `row` at multiples of TILE."""
    start, length = int(rows.starts[row]), int(rows.seq_lens[row])
    cached = length - int(rows.query_lens[row])
    slots = row_slots(rows.table[row : row + 1], np.array([0]), np.array([length]), block_size)[0]
    oldest = max(0, cached - window + 1) if window else 0
    tiles, position = [], cached
    while position < length:
        base = position // TILE * TILE
        last = min(base + TILE, length)
        key_first = max(0, base - window + 1) // TILE * TILE if window else 0
        keys = np.arange(key_first, base + TILE).clip(oldest, length - 1)
        distance = torch.arange(key_first, base + TILE) - torch.arange(base, base + TILE)[:, None]
        hidden = distance > 0
        if window:
            hidden |= distance <= -window
        tiles.append(
            InvariantTile(
                start + position - cached,
                start + last - cached,
                position - base,
                torch.from_numpy(slots[keys]).to(device),
                distance.to(device),
                hidden.to(device),
            )
        )
        position = last
    return InvariantRow(tiles)


def _attend(layer: LayerParams, query: Tensor, found: Tensor, tile: InvariantTile) -> Tensor:
    """[queries, H, D] in float32 products of fixed shape: [Hk, groups * TILE, D] by [Hk, D, L]."""
    count, heads, dim = query.shape
    kv_heads, keys = found.shape[2], found.shape[0]
    padded = torch.zeros(TILE, heads, dim, dtype=torch.float32, device=query.device)
    padded[tile.place : tile.place + count] = query
    folded = padded.permute(1, 0, 2).reshape(kv_heads, -1, dim)
    key = dequantize_kv(found[:, 0], torch.float32, layer.key_scale).transpose(0, 1).contiguous()
    value = dequantize_kv(found[:, 1], torch.float32, layer.value_scale).transpose(0, 1).contiguous()
    scores = (torch.bmm(folded, key.transpose(1, 2)) * layer.spec.scale).view(heads, TILE, keys)
    if layer.spec.soft_cap:
        scores = torch.tanh(scores / layer.spec.soft_cap) * layer.spec.soft_cap
    if layer.alibi_slopes is not None:
        scores = scores + layer.alibi_slopes.float()[:, None, None] * tile.distance
    scores = scores.masked_fill(tile.hidden, float("-inf"))
    if layer.sinks is None:
        probabilities = scores.softmax(-1)
    else:
        sinks = layer.sinks.float()[:, None, None].expand(heads, TILE, 1)
        probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].contiguous()
    result = torch.bmm(probabilities.view(kv_heads, -1, keys), value).view(heads, TILE, dim)
    return result[:, tile.place : tile.place + count].transpose(0, 1).to(query.dtype)
