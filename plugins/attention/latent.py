"""Multi-head latent attention in plain torch, for any device and dtype; the reference of the kernels.

Rows of one token are gathered in groups of similar length and attended absorbed. Rows of many new tokens are attended
expanded: first over what the step itself brings, then over what is cached in pieces of a fixed size, whose results are
merged by their log-sum-exps. Deterministic steps take one token at a time. Knows no kernel of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import BackendSetup, GroupBatch, LatentBackend, LatentParams, LatentSpec
from frame.ops import quantize_kv

from .latent_reasons import latent_reasons
from .paging import StepRows, buckets, row_slots

#: Numbers of expanded keys and values that a piece of the context may have.
PIECE_NUMBERS = 1 << 22
#: Queries of a row that are attended at once.
TILE = 256


@dataclass
class LatentGroup:
    """Rows of one token each: `tokens` [n] of the batch, `slots` [n, L], and which of those are `hidden` [n, 1, L]."""

    tokens: Tensor
    slots: Tensor
    hidden: Tensor


@dataclass
class LatentRow:
    """New tokens [`start`, `end`) of a row, and the `slots` [L] of all its tokens, theirs last."""

    start: int
    end: int
    slots: Tensor

    @property
    def num_cached(self) -> int:
        """Tokens before the new ones."""
        return len(self.slots) - (self.end - self.start)


@dataclass
class LatentPlan:
    """The step: tokens `kept` of it are stored at `slots`."""

    kept: Tensor
    slots: Tensor
    groups: list[LatentGroup] = field(default_factory=list)
    absorbed: list[LatentRow] = field(default_factory=list)
    expanded: list[LatentRow] = field(default_factory=list)


def latent_rows(batch: GroupBatch, block_size: int) -> list[LatentRow]:
    """The rows that have tokens. Reads lengths on the host."""
    rows, found = StepRows.of(batch), []
    for row in ((rows.query_lens > 0) & (rows.seq_lens > 0)).nonzero()[0].tolist():
        start, count, length = int(rows.starts[row]), int(rows.query_lens[row]), rows.seq_lens[row : row + 1]
        slots = row_slots(rows.table[row : row + 1], np.zeros_like(length), length, block_size)[0]
        found.append(LatentRow(start, start + count, torch.from_numpy(slots).to(rows.device)))
    return found


def read(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """[..., width] at `slots` [...] of a cache [blocks, block_size, width]."""
    size = kv_cache.shape[1]
    return kv_cache[slots // size, slots % size]


def store(kv_cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Writes `rows` [n, width] at `slots` [n]."""
    size = kv_cache.shape[1]
    kv_cache[slots // size, slots % size] = rows.to(kv_cache.dtype)


def packed(latent: Tensor, spec: LatentSpec) -> Tensor:
    """What a cache holds of `latent` [..., width]: of 8-bit floats the bytes of its two parts, one behind the other."""
    if spec.kv_dtype.itemsize > 1:
        return latent
    codes = quantize_kv(latent[..., : spec.rank], spec.kv_dtype)
    return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, latent[..., spec.rank :])], -1)


def unpacked(cached: Tensor, spec: LatentSpec) -> Tensor:
    """The latents [..., width] that `packed` made `cached` of, up to rounding."""
    if spec.kv_dtype.itemsize > 1:
        return cached
    codes, turned = cached[..., : spec.rank].contiguous(), cached[..., spec.rank :].contiguous()
    return torch.cat((codes.view(spec.kv_dtype).to(spec.dtype), turned.view(spec.dtype)), -1)


class TorchLatent(LatentBackend):
    """Latent attention in plain torch. Reads lengths on the host, which means a wait on devices other than the CPU."""

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        spec = self.spec
        self._piece = max(1, PIECE_NUMBERS // (spec.num_heads * (spec.nope_dim + spec.rope_dim + spec.value_dim)))
        self._least_expanded = least_expanded(spec)

    @classmethod
    def supports(cls, spec: LatentSpec) -> str | None:
        return "; ".join(latent_reasons(spec)) or None

    def plan(self, batch: GroupBatch) -> LatentPlan:
        kept = (batch.slot_mapping >= 0).nonzero()[:, 0]
        plan = LatentPlan(kept, batch.slot_mapping[kept])
        rows = latent_rows(batch, self.spec.block_size)
        if self.spec.deterministic or batch.deterministic:
            for row in rows:
                for token in range(row.start, row.end):
                    seen = row.num_cached + token - row.start + 1
                    plan.absorbed.append(LatentRow(token, token + 1, row.slots[:seen]))
            return plan
        if self.spec.top_k:
            plan.absorbed = rows
            return plan
        plan.groups = self._groups([row for row in rows if row.end - row.start == 1])
        for row in rows:
            count = row.end - row.start
            if count > 1:
                (plan.expanded if count >= self._least_expanded else plan.absorbed).append(row)
        return plan

    def _groups(self, rows: list[LatentRow]) -> list[LatentGroup]:
        lengths = np.array([len(row.slots) for row in rows], np.int64)
        found = []
        for chosen in buckets(lengths, self.spec.width * self.spec.kv_dtype.itemsize):
            some = [rows[index] for index in chosen.tolist()]
            most, device = max(len(row.slots) for row in some), some[0].slots.device
            slots = torch.stack([torch.cat((row.slots, row.slots[-1:].expand(most - len(row.slots)))) for row in some])
            ends = torch.tensor([len(row.slots) for row in some], device=device)
            hidden = torch.arange(most, device=device) >= ends[:, None]
            found.append(LatentGroup(torch.tensor([row.start for row in some], device=device), slots, hidden[:, None]))
        return found

    def forward(
        self, layer: LatentParams, query: Tensor, latent: Tensor, kv_cache: Tensor, plan: Any, chosen: Tensor | None
    ) -> Tensor:
        spec, kept = self.spec, packed(latent, self.spec)
        store(kv_cache, plan.slots, kept[plan.kept])
        out = query.new_zeros(*query.shape[:2], spec.value_dim)
        for group in plan.groups:
            latents = unpacked(read(kv_cache, group.slots), spec)
            mixed = _mix(layer.absorb(query[group.tokens]), latents, spec, group.hidden)
            out[group.tokens] = layer.values_of(mixed)
        for row in plan.absorbed:
            latents = unpacked(read(kv_cache, row.slots), spec)
            for first in range(row.start, row.end, TILE):
                part = slice(first, min(first + TILE, row.end))
                picked = None if chosen is None else chosen[part]
                mixed = _mix_row(layer.absorb(query[part]), latents, spec, row.num_cached + first - row.start, picked)
                out[part] = layer.values_of(mixed)
        for row in plan.expanded:
            out[row.start : row.end] = self._expanded(layer, query, unpacked(kept, spec), kv_cache, row)
        return out

    def _expanded(self, layer: LatentParams, query: Tensor, latent: Tensor, kv_cache: Tensor, row: LatentRow) -> Tensor:
        """[n, H, value_dim] of the row's new tokens, over them and then over pieces of what is cached."""
        new = slice(row.start, row.end)
        done, lse = _attend(query[new], *_expanded(layer, latent[new]), self.spec, True)
        for first in range(0, row.num_cached, self._piece):
            slots = row.slots[first : min(first + self._piece, row.num_cached)]
            keys, values = _expanded(layer, unpacked(read(kv_cache, slots), self.spec))
            part, of_part = _attend(query[new], keys, values, self.spec, False)
            done, lse = self.ops.merge_parts(torch.stack((done, part)), torch.stack((lse, of_part)))
        return done


def least_expanded(spec: LatentSpec) -> int:
    """New tokens of a row from which on it takes fewer multiplications to expand its latents than to absorb queries."""
    saved = 2 * spec.rank - spec.nope_dim - spec.value_dim
    return 2 if saved <= 0 else max(2, -(-spec.rank * (spec.nope_dim + spec.value_dim) // saved))


def _expanded(layer: LatentParams, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Whole keys [S, H, nope + rope] and values [S, H, value_dim]."""
    nope, values = layer.expand(latents)
    turned = latents[:, None, layer.spec.rank :].expand(-1, layer.spec.num_heads, -1)
    return torch.cat((nope, turned), -1), values


def _mix(query: Tensor, latents: Tensor, spec: LatentSpec, hidden: Tensor | None) -> Tensor:
    """[n, H, rank]: sums of `latents` [n, L, width], weighed by `query` [n, H, width], without the `hidden` ones."""
    scores = torch.bmm(query, latents.transpose(1, 2)).float() * spec.scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.bmm(scores.softmax(-1).to(query.dtype), latents[..., : spec.rank])


def _mix_row(query: Tensor, latents: Tensor, spec: LatentSpec, position: int, chosen: Tensor | None) -> Tensor:
    """As `_mix` for queries from `position` on of one row, whose tokens have `latents` [L, width]."""
    count, length = len(query), min(len(latents), position + len(query))
    if chosen is not None and length > spec.top_k:
        return _mix(query, latents[chosen.clamp(min=0).long()], spec, (chosen < 0)[:, None])
    ends = torch.arange(position, position + count, device=query.device)
    hidden = torch.arange(length, device=query.device) > ends[:, None]
    return _mix(query, latents[:length].expand(count, -1, -1), spec, hidden[:, None])


def _attend(query: Tensor, keys: Tensor, values: Tensor, spec: LatentSpec, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [n, H, value_dim] and log-sum-exps float32 [n, H] of `query` [n, H, D] over [S, H, ...]."""
    outs, lses = [], []
    for first in range(0, len(query), TILE):
        part = query[first : first + TILE]
        last = first + len(part) if causal else len(keys)
        scores = torch.einsum("nhd,shd->hns", part, keys[:last]).float() * spec.scale
        if causal:
            places = torch.arange(last, device=query.device)
            scores = scores.masked_fill(places > places[first:, None], float("-inf"))
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().to(query.dtype)
        outs.append(torch.einsum("hns,shd->nhd", weights, values[:last]))
        lses.append(lse.t())
    return torch.cat(outs), torch.cat(lses)
