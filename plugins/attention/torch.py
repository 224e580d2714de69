"""Attention in plain torch, for any device and dtype; the backend of the CPU.

Decode rows of similar length are gathered into one workspace and attended in one call, with the query heads of a KV
head as its query tokens; prompt rows go one by one, in tiles; rows without a cache go together where they are equally
long. Deterministic steps take tiles at absolute positions
instead, so that a token's bits depend on nothing but its own row. Knows no kernel of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from frame.interfaces import AttentionBackend, AttentionSpec, BackendSetup, BlockFormat, GroupBatch, LayerParams
from frame.kernels.native.rows import NativeRows
from frame.ops import Ops, dequantize_kv

from .distances import biased, own_biased
from .invariant import InvariantRow, invariant_row
from .own_rows import OwnRows, own_rows
from .paging import (
    TILE,
    CachedTokens,
    DecodeGroup,
    PromptRow,
    StepRows,
    Tile,
    buckets,
    decode_group,
    needs_distances,
    prompt_row,
    whole_row,
)
from .partial import PartialRows, partial_rows
from .reasons import Capabilities, reasons
from .token_cache import TokenCache, Workspace

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KV_FLOATS = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class TableRows:
    """Rows of one token each that kernels in C attend with: where they are in the batch, None for all of it in order.

    `tables` int32 [n, most blocks] and `lengths` int32 [n] are those of the batch, as its buffers hold them.
    """

    tokens: Tensor | None
    tables: Tensor
    lengths: Tensor


@dataclass
class TorchPlan:
    """What the layers of a group share in one step. `kept` and `slots` say which tokens are stored where."""

    kept: Tensor | None
    slots: Tensor
    covers_all: bool
    decodes: list[DecodeGroup]
    prompts: list[PromptRow]
    invariant: list[InvariantRow]
    native: TableRows | None = None


class CausalMask:
    """One additive mask for every tile: a tile sees a window of it, so nothing is built per row or per layer."""

    def __init__(self, spec: AttentionSpec, num_queries: int) -> None:
        self._spec = spec
        self._num_queries = num_queries
        self._keys = 0
        self._mask = torch.empty(0)
        self._distance: Tensor | None = None

    def views(self, tile: Tile, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """(mask, key position - query position where scores depend on it), each [queries, keys] of `tile`."""
        queries, keys = tile.last - tile.first, tile.key_last - tile.key_first
        if tile.offset > self._keys or self._mask.numel() == 0:
            self._build(tile.offset, device)
        part = slice(None, queries), slice(self._keys - tile.offset, self._keys - tile.offset + keys)
        return self._mask[part], None if self._distance is None else self._distance[part]

    def _build(self, needed: int, device: torch.device) -> None:
        self._keys = max(2 * self._keys, needed, self._num_queries)
        query = torch.arange(self._num_queries, device=device)[:, None] + self._keys
        distance = torch.arange(self._keys + self._num_queries, device=device)[None, :] - query
        hidden = distance > 0
        if self._spec.window:
            hidden |= distance <= -self._spec.window
        self._mask = torch.zeros(hidden.shape, dtype=self._spec.dtype, device=device)
        self._mask.masked_fill_(hidden, float("-inf"))
        self._distance = distance if needs_distances(self._spec) else None  # twice as large as the mask


class TorchAttention(AttentionBackend):
    """Attention in plain torch. Reads lengths on the host, which means a wait a step on devices other than the CPU."""

    takes_head_scales = True

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._mask = CausalMask(self.spec, TILE)
        self._workspace = Workspace()
        self._caches: dict[int, TokenCache] = {}
        self._native = _native_rows(self.ops, self.spec)
        paged = self.spec.kind == "decoder" and not (self.spec.returns_lse or self.spec.deterministic)
        if self._native is not None and paged:
            self.needs_python = False

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        kinds = ("decoder", "encoder_only", "encoder", "cross")
        can = Capabilities(dtypes=FLOATS, kv_dtypes=KV_FLOATS, kinds=kinds, returns_lse=True, distances=True)
        return "; ".join(reasons(spec, can)) or None

    @classmethod
    def kv_format(cls, spec: AttentionSpec) -> BlockFormat:
        """A token's key and value are one piece, and tokens lie at even distances."""
        shape = (2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return BlockFormat(shape, (1, 0, 2, 3), spec.kv_dtype, block_axis=1, head_axis=2, token_axis=1)

    def plan(self, batch: GroupBatch) -> TorchPlan | OwnRows | PartialRows:
        if self.spec.returns_lse:
            return partial_rows(batch, self.spec)
        if self.spec.kind == "cross":
            return self._cross_plan(batch)
        if self.spec.kind != "decoder":
            alone = self.spec.deterministic or batch.deterministic
            return own_rows(batch, alone=alone, window=self.spec.window)
        return self._paged_plan(batch)

    def forward(
        self,
        layer: LayerParams,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        plan: TorchPlan | OwnRows | PartialRows,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(plan, OwnRows):
            own = partial(attend, layer)
            if layer.distance_bias is not None:
                own = partial(own_biased, own, layer.distance_bias)
            return plan.attend(own, query, key, value)
        if isinstance(plan, PartialRows):
            cache = self._cache(kv_cache)
            cache.store(key[plan.kept], value[plan.kept], plan.slots, (layer.key_scale, layer.value_scale))
            return plan.attend(layer, query, cache.gather)
        return self._paged(layer, query, key, value, kv_cache, plan)

    def _cache(self, kv_cache: Tensor) -> TokenCache:
        cache = self._caches.get(id(kv_cache))
        if cache is None:
            # The entry holds the tensor, so its id stays its own; a group has a handful of layers.
            cache = self._caches[id(kv_cache)] = TokenCache(kv_cache, self._workspace, self._native)
        return cache

    def _paged_plan(self, batch: GroupBatch) -> TorchPlan:
        spec, lens = self.spec, batch.host_query_lens
        plain = self._native is not None and not (spec.deterministic or batch.deterministic)
        if plain and len(lens) == batch.num_tokens == np.count_nonzero(lens):
            rows_of_table = TableRows(None, batch.block_table, batch.seq_lens)
            return TorchPlan(None, batch.slot_mapping, True, [], [], [], rows_of_table)
        rows = StepRows.of(batch)
        kept, slots = _stored(batch)
        if rows.all_decode and not (spec.deterministic or batch.deterministic):
            single = np.arange(batch.num_tokens)
            return TorchPlan(kept, slots, True, self._decode_groups(rows, single), [], [])
        live = (rows.query_lens > 0) & (rows.seq_lens > 0)
        plan = TorchPlan(kept, slots, int(rows.query_lens[live].sum()) == batch.num_tokens, [], [], [])
        if spec.deterministic or batch.deterministic:
            for row in live.nonzero()[0].tolist():
                plan.invariant.append(invariant_row(rows, row, spec.window, spec.block_size, rows.device))
            return plan
        self._plan_decodes(plan, rows, batch, (live & (rows.query_lens == 1)).nonzero()[0])
        several = (live & (rows.query_lens > 1)).nonzero()[0].tolist()
        plan.prompts = [prompt_row(rows, row, spec) for row in several]
        return plan

    def _plan_decodes(self, plan: TorchPlan, rows: StepRows, batch: GroupBatch, single: np.ndarray) -> None:
        """Adds the rows `single`, which have one token each, to the plan."""
        if self._native is None:
            plan.decodes = self._decode_groups(rows, single)
        elif len(single):
            index, tokens = torch.from_numpy(single), torch.from_numpy(rows.starts[single])
            plan.native = TableRows(tokens, batch.block_table[index], batch.seq_lens[index])

    def _cross_plan(self, batch: GroupBatch) -> TorchPlan:
        """Rows over all of their cached tokens; what is stored need not be of these rows."""
        rows = StepRows.of(batch)
        live = (rows.query_lens > 0) & (rows.seq_lens > 0)
        covers_all = int(rows.query_lens[live].sum()) == batch.num_tokens
        several = (live & (rows.query_lens > 1)).nonzero()[0].tolist()
        prompts = [whole_row(rows, row, self.spec) for row in several]
        plan = TorchPlan(None, batch.slot_mapping, covers_all, [], prompts, [])
        self._plan_decodes(plan, rows, batch, (live & (rows.query_lens == 1)).nonzero()[0])
        return plan

    def _decode_groups(self, rows: StepRows, single: np.ndarray) -> list[DecodeGroup]:
        """The rows `single`, which have one token each, in groups of similar length."""
        spec, lengths = self.spec, rows.seq_lens[single]
        if spec.window:
            lengths = np.minimum(lengths, spec.window)
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_dtype.itemsize
        return [decode_group(rows, single[chosen], spec) for chosen in buckets(lengths, token_bytes)]

    def _paged(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: TorchPlan
    ) -> Tensor:
        cache = self._cache(kv_cache)
        if plan.kept is not None:
            key, value = key[plan.kept], value[plan.kept]
        cache.store(key, value, plan.slots, (layer.key_scale, layer.value_scale))
        if self._native is not None and plan.native is not None and plan.native.tokens is None:
            return self._native_decode(self._native, query, cache, plan.native)
        if len(plan.decodes) == 1 and plan.decodes[0].whole:
            return self._decode(layer, query, cache, plan.decodes[0])
        out = torch.empty_like(query) if plan.covers_all else torch.zeros_like(query)
        if self._native is not None and plan.native is not None and plan.native.tokens is not None:
            tokens = plan.native.tokens
            found = self._native_decode(self._native, query.index_select(0, tokens), cache, plan.native)
            out.index_copy_(0, tokens, found)
        for group in plan.decodes:
            out.index_copy_(0, group.tokens, self._decode(layer, query.index_select(0, group.tokens), cache, group))
        for row in plan.prompts:
            if row.cached is None:
                keys, values = key[row.start : row.end], value[row.start : row.end]
            else:
                keys, values = self._read(layer, cache, row.cached)
            self._prompt(layer, query, keys, values, row, out)
        for part in plan.invariant:
            part.attend(layer, query, cache.gather, out)
        return out

    def _read(self, layer: LayerParams, cache: TokenCache, cached: CachedTokens) -> tuple[Tensor, Tensor]:
        """Keys and values [n, Hk, D] in the layers' dtype; a run of slots is read where it lies."""
        if cached.start is not None and cache.flat:
            keys = cache.keys.narrow(0, cached.start, cached.length)
            values = cache.values.narrow(0, cached.start, cached.length)
        else:
            keys, values = cache.gather(cached.slots).unbind(1)
        if keys.dtype != self.spec.dtype:
            dtype = self.spec.dtype
            return dequantize_kv(keys, dtype, layer.key_scale), dequantize_kv(values, dtype, layer.value_scale)
        return keys, values

    def _decode(self, layer: LayerParams, query: Tensor, cache: TokenCache, group: DecodeGroup) -> Tensor:
        """[count, H, D]: the query heads of a KV head are its query tokens, so that no key is repeated."""
        count, heads, dim = query.shape
        kv_heads = self.spec.num_kv_heads
        keys, values = self._read(layer, cache, group.cached)
        mask = group.mask
        if layer.alibi_slopes is not None and group.distance is not None:
            bias = layer.alibi_slopes.to(query.dtype).view(1, kv_heads, -1, 1) * group.distance
            mask = bias if mask is None else bias + mask
        if layer.distance_bias is not None and group.distance is not None:
            bias = biased(layer.distance_bias, group.distance.view(count, -1), query.dtype)
            bias = bias.transpose(0, 1).unflatten(1, (kv_heads, -1))
            mask = bias if mask is None else bias + mask
        folded = query.reshape(count, kv_heads, heads // kv_heads, dim)
        keys = keys.unflatten(0, (count, group.length)).transpose(1, 2)
        values = values.unflatten(0, (count, group.length)).transpose(1, 2)
        return attend(layer, folded, keys, values, mask).reshape(count, heads, dim)

    def _native_decode(self, native: NativeRows, query: Tensor, cache: TokenCache, rows: TableRows) -> Tensor:
        """[n, H, D], from keys and values where they lie."""
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            query = query.contiguous()
        return native.attend(query, *cache.blocks, rows.tables, rows.lengths, self.spec.scale, self.spec.window)

    def _prompt(
        self, layer: LayerParams, query: Tensor, keys: Tensor, values: Tensor, row: PromptRow, out: Tensor
    ) -> None:
        """Fills the row's part of `out`; `keys`, `values` [L, Hk, D] are those of the row."""
        keys, values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
        if not row.tiles:
            queries = query[row.start : row.end].transpose(0, 1).unsqueeze(0)
            out[row.start : row.end] = attend(layer, queries, keys, values, None, row.causal).squeeze(0).transpose(0, 1)
        for tile in row.tiles:
            mask, distance = self._mask.views(tile, query.device)
            if layer.alibi_slopes is not None and distance is not None:
                mask = layer.alibi_slopes.to(query.dtype)[:, None, None] * distance + mask
            if layer.distance_bias is not None and distance is not None:
                mask = biased(layer.distance_bias, distance, query.dtype) + mask
            queries = query[tile.first : tile.last].transpose(0, 1).unsqueeze(0)
            part = slice(tile.key_first, tile.key_last)
            found = attend(layer, queries, keys[:, :, part], values[:, :, part], mask)
            out[tile.first : tile.last] = found.squeeze(0).transpose(0, 1)


def attend(
    layer: LayerParams, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """Attention of `query` [n, H, M, D] over `keys`, `values` [n, Hk, L, D] under an additive `mask`.

    `causal` (only without soft cap and sinks): query i sees the keys 0 .. i.
    """
    spec = layer.spec
    groups = query.shape[1] // keys.shape[1]
    if not spec.soft_cap and layer.sinks is None:
        if mask is not None and mask.dim() == 2:
            mask = mask[None, None]
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=groups > 1
        )
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


def _native_rows(ops: Ops, spec: AttentionSpec) -> NativeRows | None:
    """The kernels in C of the CPU platform, where they know all that such layers ask for."""
    native: NativeRows | None = getattr(ops, "native", None) if spec.device_type == "cpu" else None
    special = spec.soft_cap or spec.sinks or needs_distances(spec) or spec.dtype != spec.kv_dtype
    if native is None or special or not native.attends(spec.dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim):
        return None
    return native


def _stored(batch: GroupBatch) -> tuple[Tensor | None, Tensor]:
    """(tokens that are stored, None for all of them; their slots)."""
    slots = batch.slot_mapping
    kept = (slots.cpu().numpy() >= 0).nonzero()[0]
    if len(kept) == len(slots):
        return None, slots
    chosen = torch.from_numpy(kept).to(slots.device)
    return chosen, slots[chosen]
