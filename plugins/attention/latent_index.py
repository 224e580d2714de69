"""The index of sparse latent attention (DeepSeek-AI 2025) in plain torch: which tokens each token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import GroupBatch, IndexBackend, IndexSpec

from .latent import LatentRow, latent_rows, read, store
from .latent_reasons import latent_reasons

#: Numbers of scores of single heads that are held at once.
TILE_NUMBERS = 1 << 22


@dataclass
class IndexPlan:
    """The step: tokens `kept` of it are stored at `slots`; its rows."""

    kept: Tensor
    slots: Tensor
    rows: list[LatentRow]


class TorchIndex(IndexBackend):
    """Scores every token of a row, row by row. Reads lengths on the host."""

    @classmethod
    def supports(cls, spec: IndexSpec) -> str | None:
        return "; ".join(latent_reasons(spec)) or None

    def plan(self, batch: GroupBatch) -> IndexPlan:
        kept = (batch.slot_mapping >= 0).nonzero()[:, 0]
        rows = latent_rows(batch, self.spec.block_size)
        if self.spec.deterministic or batch.deterministic:  # so that a token's bits depend on nothing but its own row
            rows = [
                LatentRow(token, token + 1, row.slots[: row.num_cached + token - row.start + 1])
                for row in rows
                for token in range(row.start, row.end)
            ]
        return IndexPlan(kept, batch.slot_mapping[kept], rows)

    def forward(
        self, spec: IndexSpec, query: Tensor, weights: Tensor, key: Tensor, kv_cache: Tensor, plan: Any
    ) -> Tensor:
        store(kv_cache, plan.slots, key[plan.kept])
        chosen = torch.full((len(query), spec.top_k), -1, dtype=torch.int32, device=query.device)
        for row in plan.rows:
            if len(row.slots) <= spec.top_k:  # all tokens: nothing is scored
                continue
            keys = read(kv_cache, row.slots).float()
            tile = max(1, TILE_NUMBERS // (spec.num_heads * len(keys)))
            for first in range(row.start, row.end, tile):
                part = slice(first, min(first + tile, row.end))
                position = row.num_cached + first - row.start
                chosen[part] = _best(query[part].float(), weights[part].float(), keys, position, spec)
        return chosen


def _best(query: Tensor, weights: Tensor, keys: Tensor, position: int, spec: IndexSpec) -> Tensor:
    """int32 [n, top_k] for queries [n, H, D] from `position` on over `keys` [L, D]."""
    scores = torch.einsum("nhd,ld->nhl", query, keys).mul_(spec.scale).relu_()
    scores = torch.einsum("nh,nhl->nl", weights, scores)
    ends = torch.arange(position, position + len(query), device=query.device)
    scores = scores.masked_fill(torch.arange(len(keys), device=query.device) > ends[:, None], float("-inf"))
    best = scores.topk(spec.top_k, -1)
    return torch.where(best.values == float("-inf"), -1, best.indices).to(torch.int32)
