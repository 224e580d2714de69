"""Latent attention and its index as their formulas say, row by row in float32: any device, slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from frame.core.interfaces.attention import GroupBatch
from frame.core.interfaces.latent import IndexBackend, IndexSpec, LatentBackend, LatentParams, LatentSpec
from frame.core.ops.attention import quantize_kv


class ReferenceLatent(LatentBackend):
    """Expands every latent of a row; for tests of models and other backends."""

    @classmethod
    def supports(cls, spec: LatentSpec) -> str | None:
        return "bits depend on the batch" if spec.deterministic else None

    def plan(self, batch: GroupBatch) -> GroupBatch:
        return batch

    def forward(
        self, layer: LatentParams, query: Tensor, latent: Tensor, kv_cache: Tensor, plan: Any, chosen: Tensor | None
    ) -> Tensor:
        spec = layer.spec
        _store(kv_cache, _packed(latent, spec), plan)
        exact = LatentParams(spec, layer.up.float())
        out = query.new_zeros(*query.shape[:2], spec.value_dim)
        for tokens, cached in _rows(kv_cache, plan):
            seen = _unpacked(cached, spec)
            nope, values = exact.expand(seen.float())
            turned = seen[:, None, spec.rank :].float().expand(-1, spec.num_heads, -1)
            keys = torch.cat((nope, turned), -1)
            hidden = _later(tokens, len(seen), query.device)
            if chosen is not None and len(seen) > spec.top_k:
                hidden |= _unchosen(chosen[tokens], len(seen))
            scores = torch.einsum("nhd,shd->hns", query[tokens].float(), keys) * spec.scale
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[tokens] = torch.einsum("hns,shd->nhd", weights, values).to(out.dtype)
        return out


class ReferenceIndex(IndexBackend):
    """Scores every token of a row."""

    @classmethod
    def supports(cls, spec: IndexSpec) -> str | None:
        return "bits depend on the batch" if spec.deterministic else None

    def plan(self, batch: GroupBatch) -> GroupBatch:
        return batch

    def forward(
        self, spec: IndexSpec, query: Tensor, weights: Tensor, key: Tensor, kv_cache: Tensor, plan: Any
    ) -> Tensor:
        _store(kv_cache, key, plan)
        chosen = torch.full((len(query), spec.top_k), -1, dtype=torch.int32, device=query.device)
        for tokens, seen in _rows(kv_cache, plan):
            scores = (torch.einsum("nhd,sd->nhs", query[tokens].float(), seen.float()) * spec.scale).relu()
            scores = torch.einsum("nh,nhs->ns", weights[tokens].float(), scores)
            scores = scores.masked_fill(_later(tokens, len(seen), query.device), float("-inf"))
            best = scores.topk(min(spec.top_k, len(seen)), -1)
            found = torch.where(best.values == float("-inf"), -1, best.indices)
            chosen[tokens, : found.shape[1]] = found.to(torch.int32)
        return chosen


def _packed(latent: Tensor, spec: LatentSpec) -> Tensor:
    """What a cache holds of `latent` [n, width]; of 8-bit floats as bytes."""
    if spec.kv_dtype.itemsize > 1:
        return latent
    codes = quantize_kv(latent[:, : spec.rank], spec.kv_dtype).view(torch.uint8)
    return torch.cat((codes, latent[:, spec.rank :].contiguous().view(torch.uint8)), 1)


def _unpacked(cached: Tensor, spec: LatentSpec) -> Tensor:
    """The latents [n, width] that `_packed` made `cached` of, up to rounding."""
    if spec.kv_dtype.itemsize > 1:
        return cached
    codes = cached[:, : spec.rank].contiguous().view(spec.kv_dtype)
    return torch.cat((codes.to(spec.dtype), cached[:, spec.rank :].contiguous().view(spec.dtype)), 1)


def _store(kv_cache: Tensor, rows: Tensor, batch: GroupBatch) -> None:
    kept = batch.slot_mapping >= 0
    slots, size = batch.slot_mapping[kept], kv_cache.shape[1]
    kv_cache[slots // size, slots % size] = rows[kept].to(kv_cache.dtype)


def _rows(kv_cache: Tensor, batch: GroupBatch) -> Iterator[tuple[slice, Tensor]]:
    """(its tokens in the batch, what is cached of it [L, width]) of each row."""
    starts = batch.query_start.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        if length and starts[row + 1] > starts[row]:
            blocks = batch.block_table[row, : -(-length // kv_cache.shape[1])].long()
            yield slice(starts[row], starts[row + 1]), kv_cache[blocks].flatten(0, 1)[:length]


def _later(tokens: slice, length: int, device: torch.device) -> Tensor:
    """[n, L]: which tokens of a row lie behind each of its last n."""
    count = tokens.stop - tokens.start
    return torch.ones(count, length, dtype=torch.bool, device=device).triu(length - count + 1)


def _unchosen(chosen: Tensor, length: int) -> Tensor:
    others = torch.ones(len(chosen), length + 1, dtype=torch.bool, device=chosen.device)
    return others.scatter(1, chosen.long() % (length + 1), False)[:, :length]
