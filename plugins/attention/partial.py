"""Attention that tells its log-sum-exps, over the tokens of each row that this cache holds, in plain torch.

Rows go one by one, in tiles of queries, in float32. Deterministic steps take one query at a time, so that a token's
bits depend on nothing but its own row. Knows no cache but its slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import AttentionSpec, GroupBatch, LayerParams
from frame.ops import dequantize_kv

from .paging import TILE, StepRows, row_slots


@dataclass
class PartialTile:
    """Queries [`first`, `last`) of the batch over the held tokens at `slots` [L], without the `hidden` [queries, L]."""

    first: int
    last: int
    slots: Tensor
    hidden: Tensor


@dataclass
class PartialRows:
    """The rows of a step. Tokens `kept` of it are stored, at `slots`."""

    kept: Tensor
    slots: Tensor
    tiles: list[PartialTile]

    def attend(self, layer: LayerParams, query: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Output [T, H, D] and log-sum-exp [T, H]; `gather(slots [L])` gives keys and values [L, 2, Hk, D]."""
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        lse = torch.full(query.shape[:2], float("-inf"), device=query.device)
        for tile in self.tiles:
            part = slice(tile.first, tile.last)
            out[part], lse[part] = _attend(layer, query[part].float(), gather(tile.slots), tile.hidden)
        return out, lse


def partial_rows(batch: GroupBatch, spec: AttentionSpec) -> PartialRows:
    """The plan of a step. Reads lengths on the host."""
    rows, share, device = StepRows.of(batch), spec.context, batch.slot_mapping.device
    slots = share.slots(batch.slot_mapping)
    kept = (slots >= 0).nonzero()[:, 0]
    size = 1 if spec.deterministic or batch.deterministic else TILE
    tiles = []
    for row in ((rows.query_lens > 0) & (rows.seq_lens > 0)).nonzero()[0].tolist():
        start, count, length = int(rows.starts[row]), int(rows.query_lens[row]), int(rows.seq_lens[row])
        for first in range(length - count, length, size):
            positions = np.arange(first, min(first + size, length))
            ends = share.held(positions + 1)  # of the held tokens, the first that the query may not see
            begins = np.maximum(ends - spec.window // share.ranks, 0) if spec.window else np.zeros_like(ends)
            low, high = int(begins[0]), int(ends[-1])
            if high == low:
                continue
            keys = np.arange(low, high)
            hidden = (keys >= ends[:, None]) | (keys < begins[:, None])
            places = row_slots(rows.table[row : row + 1], np.array([low]), np.array([high]), spec.block_size)[0]
            token = start + first - (length - count)
            tiles.append(
                PartialTile(
                    token,
                    token + len(positions),
                    torch.from_numpy(places).to(device),
                    torch.from_numpy(hidden).to(device),
                )
            )
    return PartialRows(kept, slots[kept], tiles)


def _attend(layer: LayerParams, query: Tensor, found: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    spec, groups = layer.spec, query.shape[1] // found.shape[2]
    keys = dequantize_kv(found[:, 0], torch.float32, layer.key_scale).repeat_interleave(groups, 1)
    values = dequantize_kv(found[:, 1], torch.float32, layer.value_scale).repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->qhk", query, keys) * spec.scale
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    if layer.alibi_slopes is not None:
        # without shares of a context, keys follow each other up to the last query's own
        distance = torch.arange(1 - len(found), 1, device=query.device) - torch.arange(
            1 - len(query), 1, device=query.device
        ).unsqueeze(1)
        scores = scores + layer.alibi_slopes.float()[:, None] * distance[:, None]
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.float()[:, None].expand(len(query), -1, 1)
        scores = torch.cat((scores, sinks), -1)
        values = torch.cat((values, torch.zeros_like(values[:1])))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    return torch.einsum("qhk,khd->qhd", weights, values), lse
