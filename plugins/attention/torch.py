"""Attention in plain torch: any device and any dtype, and the backend that CPU speed rests on.

Decode rows of similar length are gathered into one workspace and attended in one call, with the query heads of a KV
head as its query tokens; prompt rows go one by one, in tiles. Deterministic steps take tiles at absolute positions
instead, so that a token's bits depend on nothing but its own row. Knows no kernel of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from frame.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec, LayerParams

from .invariant import InvariantRow, invariant_row
from .paging import TILE, DecodeGroup, PromptRow, StepRows, Tile, buckets, decode_group, prompt_row
from .reasons import Capabilities, reasons

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class TorchPlan:
    """What the layers of a group share in one step. `kept` and `slots` say which tokens are stored where."""

    kept: Tensor | None
    slots: Tensor
    covers_all: bool
    decodes: list[DecodeGroup]
    prompts: list[PromptRow]
    invariant: list[InvariantRow]


class CausalMask:
    """One additive mask for every tile: a tile sees a window of it, so nothing is built per row or per layer."""

    def __init__(self, window: int, num_queries: int) -> None:
        self._window = window
        self._num_queries = num_queries
        self._keys = 0
        self._mask = torch.empty(0)
        self._distance = torch.empty(0)

    def views(self, tile: Tile, like: Tensor) -> tuple[Tensor, Tensor]:
        """(mask, key position - query position), each [queries, keys] of `tile`."""
        queries, keys = tile.last - tile.first, tile.key_last - tile.key_first
        if tile.offset > self._keys or self._mask.numel() == 0:
            self._build(tile.offset, like)
        start = self._keys - tile.offset
        return self._mask[:queries, start : start + keys], self._distance[:queries, start : start + keys]

    def _build(self, needed: int, like: Tensor) -> None:
        self._keys = max(2 * self._keys, needed, self._num_queries)
        device = like.device
        query = torch.arange(self._num_queries, device=device)[:, None] + self._keys
        self._distance = torch.arange(self._keys + self._num_queries, device=device)[None, :] - query
        hidden = self._distance > 0
        if self._window:
            hidden |= self._distance <= -self._window
        self._mask = torch.zeros(hidden.shape, dtype=like.dtype, device=device).masked_fill_(hidden, float("-inf"))


class TorchAttention(AttentionBackend):
    """See the module. Reads the batch's lengths on the host: free on the CPU, a wait per step elsewhere."""

    def __init__(self, spec: AttentionSpec, *, config: Any, options: Any = None, ops: Any) -> None:
        super().__init__(spec, config=config, options=options, ops=ops)
        self._mask: CausalMask | None = None
        self._workspace = torch.empty(0)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return "; ".join(reasons(spec, Capabilities(dtypes=FLOATS, kv_dtypes=FLOATS))) or None

    @classmethod
    def kv_stride_order(cls) -> tuple[int, ...]:
        """Block, token, key or value: a token's key and value are one piece, and tokens lie at even distances."""
        return 1, 2, 0, 3, 4

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        spec, rows = self.spec, StepRows.of(batch)
        device = batch.block_table.device
        like = torch.empty(0, dtype=spec.dtype, device=device)
        live = (rows.query_lens > 0) & (rows.seq_lens > 0)
        kept, slots = _stored(batch)
        plan = TorchPlan(kept, slots, int(rows.query_lens[live].sum()) == batch.num_tokens, [], [], [])
        if spec.deterministic or batch.deterministic:
            for row in np.flatnonzero(live).tolist():
                plan.invariant.append(invariant_row(rows, row, spec.window, spec.block_size, device))
            return plan
        single = np.flatnonzero(live & (rows.query_lens == 1))
        lengths = rows.seq_lens[single]
        if spec.window:
            lengths = np.minimum(lengths, spec.window)
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_dtype.itemsize
        for chosen in buckets(lengths, token_bytes):
            plan.decodes.append(decode_group(rows, single[chosen], spec.window, spec.block_size, like))
        from_cache = spec.dtype != spec.kv_dtype
        for row in np.flatnonzero(live & (rows.query_lens > 1)).tolist():
            plan.prompts.append(prompt_row(rows, row, spec.window, spec.block_size, from_cache, device))
        return plan

    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: TorchPlan
    ) -> Tensor:
        tokens = kv_cache.permute(1, 2, 0, 3, 4)
        flat = tokens.view(-1, *tokens.shape[2:]) if tokens.is_contiguous() else None
        self._store(key, value, tokens, flat, plan)
        if len(plan.decodes) == 1 and plan.decodes[0].tokens is None:
            return self._decode(layer, query, tokens, flat, plan.decodes[0])
        out = torch.empty_like(query) if plan.covers_all else torch.zeros_like(query)
        for group in plan.decodes:
            out[group.tokens] = self._decode(layer, query[group.tokens], tokens, flat, group)
        for row in plan.prompts:
            self._prompt(layer, query, key, value, tokens, flat, row, out)
        for part in plan.invariant:
            part.attend(layer, query, lambda slots: self._gather(tokens, flat, slots), out)
        return out

    def _store(self, key: Tensor, value: Tensor, tokens: Tensor, flat: Tensor | None, plan: TorchPlan) -> None:
        if plan.kept is not None:
            key, value = key[plan.kept], value[plan.kept]
        key, value = key.to(tokens.dtype), value.to(tokens.dtype)
        if flat is not None:
            flat[:, 0].index_copy_(0, plan.slots, key)
            flat[:, 1].index_copy_(0, plan.slots, value)
            return
        block, offset = plan.slots // tokens.shape[1], plan.slots % tokens.shape[1]
        tokens[block, offset, 0] = key
        tokens[block, offset, 1] = value

    def _gather(self, tokens: Tensor, flat: Tensor | None, slots: Tensor) -> Tensor:
        """[n, 2, Hk, D] of the cache at `slots` [n], valid until the next call, in the spec's dtype."""
        if flat is None:
            return tokens[slots // tokens.shape[1], slots % tokens.shape[1]].to(self.spec.dtype)
        shape = (slots.shape[0], *flat.shape[1:])
        size = slots.shape[0] * flat[0].numel()
        if self._workspace.numel() < size or self._workspace.dtype != flat.dtype:
            self._workspace = torch.empty(size + size // 4, dtype=flat.dtype, device=flat.device)
        found = torch.index_select(flat, 0, slots, out=self._workspace[:size].view(shape))
        return found.to(self.spec.dtype)

    def _decode(
        self, layer: LayerParams, query: Tensor, tokens: Tensor, flat: Tensor | None, group: DecodeGroup
    ) -> Tensor:
        count, heads, dim = query.shape
        kv_heads = tokens.shape[3]
        found = self._gather(tokens, flat, group.slots).view(group.count, group.length, 2, kv_heads, dim)
        mask = group.mask
        if layer.alibi_slopes is not None:
            slopes = layer.alibi_slopes.to(query.dtype).view(1, kv_heads, -1, 1)
            bias = slopes * group.distance
            mask = bias if mask is None else bias + mask
        folded = query.reshape(count, kv_heads, heads // kv_heads, dim)
        keys, values = found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)
        return attend(layer, folded, keys, values, mask).reshape(count, heads, dim)

    def _prompt(
        self,
        layer: LayerParams,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tokens: Tensor,
        flat: Tensor | None,
        row: PromptRow,
        out: Tensor,
    ) -> None:
        if row.slots is None:
            keys, values = key[row.start : row.end], value[row.start : row.end]
        else:
            keys, values = self._gather(tokens, flat, row.slots).unbind(1)
        if self._mask is None:
            self._mask = CausalMask(self.spec.window, TILE)
        for tile in row.tiles:
            mask, distance = self._mask.views(tile, query)
            if layer.alibi_slopes is not None:
                mask = layer.alibi_slopes.to(query.dtype)[:, None, None] * distance + mask
            part = (
                query[tile.first : tile.last],
                keys[tile.key_first : tile.key_last],
                values[tile.key_first : tile.key_last],
            )
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in part)
            out[tile.first : tile.last] = attend(layer, q, k, v, mask).squeeze(0).transpose(0, 1)


def attend(layer: LayerParams, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of `query` [n, H, M, D] over `keys`, `values` [n, Hk, L, D] under an additive `mask`."""
    spec = layer.spec
    if not spec.soft_cap and layer.sinks is None:
        grouped = query.shape[1] != keys.shape[1]
        if mask is not None and mask.dim() == 2:
            mask = mask[None, None]
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=spec.scale, enable_gqa=grouped
        )
    groups = query.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = (query.float() @ keys.float().transpose(-1, -2)) * spec.scale
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    if mask is not None:
        scores = scores + mask
    if layer.sinks is None:
        return (scores.softmax(-1) @ values.float()).to(query.dtype)
    sinks = layer.sinks.float().view(1, query.shape[1], -1, 1).expand(*scores.shape[:3], 1)
    probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return (probabilities @ values.float()).to(query.dtype)


def _stored(batch: AttentionBatch) -> tuple[Tensor | None, Tensor]:
    """(tokens that are stored, None for all of them; their slots)."""
    slots = batch.slot_mapping.long()
    if bool((slots >= 0).all()):
        return None, slots
    kept = torch.nonzero(slots >= 0).squeeze(1)
    return kept, slots[kept]
