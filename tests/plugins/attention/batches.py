"""Random paged batches for attention tests, on any device, with a poisoned cache outside what rows may read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec, GroupBatch, LayerParams
from frame.core.ops import Ops
from frame.interfaces import BackendSetup
from frame.kernels import attention, decode
from frame.kernels.decode import DecodeLaunch
from frame.plugins.attention.triton import TritonAttention

SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    scale=0.25,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    block_size=4,
    device_type="cpu",
)


@dataclass
class Case:
    """One step: the batch, what the layers are given, and the cache of what came before."""

    spec: AttentionSpec
    layer: LayerParams
    batch: GroupBatch
    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor


def spec_of(**changes: Any) -> AttentionSpec:
    """The small default layer with some fields changed; the KV dtype follows the dtype."""
    if "dtype" in changes:
        changes.setdefault("kv_dtype", changes["dtype"])
    return replace(SPEC, **changes)


def empty_cache(backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int, page_slack: int = 0) -> Tensor:
    """A cache of NaN in the backend's memory order; `page_slack` extra elements lie between two blocks."""
    block = backend.kv_format(spec)
    size = math.prod(block.shape) + page_slack
    memory = torch.full((num_blocks, size), float("nan"), dtype=spec.kv_dtype, device=spec.device_type)
    return block.view(memory.view(torch.uint8))


def make_case(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    rows: list[tuple[int, int]],
    *,
    seed: int = 0,
    page_slack: int = 0,
    padding_tokens: int = 0,
    padding_rows: int = 0,
    scales: tuple[float | Tensor, float | Tensor] = (1.0, 1.0),
) -> Case:
    """`rows` holds (tokens cached before, query tokens) of each row, `scales` those of keys and values, or of heads."""
    draw = np.random.default_rng(seed)
    torch_draw = torch.Generator().manual_seed(seed)
    device, size = spec.device_type, spec.block_size

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch_draw, dtype=torch.float64).to(spec.dtype).to(device)

    needed = [-(-(cached + count) // size) for cached, count in rows]
    num_blocks = sum(needed) + 3
    free = draw.permutation(np.arange(1, num_blocks))
    table = draw.integers(0, num_blocks, (len(rows) + padding_rows, max(needed, default=1) + 2)).astype(np.int32)
    cache = empty_cache(backend, spec, num_blocks, page_slack)
    slots, given = [], 0
    for row, (cached, count) in enumerate(rows):
        blocks = free[given : given + needed[row]]
        given += needed[row]
        table[row, : needed[row]] = blocks
        positions = np.arange(cached + count)
        places = torch.from_numpy(blocks[positions // size] * size + positions % size).to(device)
        first = max(0, cached - spec.window + 1) // size * size if spec.window else 0
        if cached > first:
            shape = (cached - first, spec.num_kv_heads, spec.head_dim)
            key_scale, value_scale = scales
            places_before = places[first:cached]
            Ops.write_kv(
                random(*shape), random(*shape), cache, places_before, key_scale=key_scale, value_scale=value_scale
            )
        slots.append(places[cached:])
    query_lens = np.array([count for _, count in rows] + [0] * padding_rows, dtype=np.int32)
    seq_lens = np.array([sum(row) for row in rows] + [0] * padding_rows, dtype=np.int32)
    num_tokens = int(query_lens.sum()) + padding_tokens
    slots.append(torch.full((padding_tokens,), -1, device=device))
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    batch = GroupBatch(
        num_tokens=num_tokens,
        query_start=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens.copy()).to(device),
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=torch.cat(slots).long(),
        host_query_lens=query_lens,
        host_seq_lens=seq_lens,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        deterministic=spec.deterministic,
    )
    heads = spec.num_heads
    layer = LayerParams(
        spec,
        sinks=random(heads).float() if spec.sinks else None,
        alibi_slopes=random(heads).abs().float() if spec.alibi else None,
        key_scale=scales[0],
        value_scale=scales[1],
    )
    return Case(
        spec,
        layer,
        batch,
        random(num_tokens, heads, spec.head_dim),
        random(num_tokens, spec.num_kv_heads, spec.head_dim),
        random(num_tokens, spec.num_kv_heads, spec.head_dim),
        cache,
    )


def expected(case: Case) -> tuple[Tensor, Tensor]:
    """(output, cache) by the reference ops."""
    cache, batch, spec = case.cache.clone(), case.batch, case.spec
    scales = {"key_scale": case.layer.key_scale, "value_scale": case.layer.value_scale}
    Ops.write_kv(case.key, case.value, cache, batch.slot_mapping, **scales)
    out = Ops.paged_attention(
        case.query,
        cache,
        batch.query_start,
        batch.seq_lens,
        batch.block_table,
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        sinks=case.layer.sinks,
        alibi_slopes=case.layer.alibi_slopes,
        **scales,
    )
    return out, cache


def run(backend: type[AttentionBackend], case: Case) -> tuple[Tensor, Tensor]:
    """(output, cache) by `backend`; the case's own cache stays as it was."""
    made = backend(BackendSetup(case.spec, Ops()))
    cache = case.cache.clone()
    out = made.forward(case.layer, case.query, case.key, case.value, cache, made.plan(case.batch))
    return out, cache


def check(backend: type[AttentionBackend], case: Case, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """`backend` gives the reference's output and cache, and finite rows for padding."""
    out, cache = run(backend, case)
    want, want_cache = expected(case)
    assert out.shape == case.query.shape
    assert out.dtype == case.query.dtype
    assert torch.isfinite(out).all()
    torch.testing.assert_close(cache.float(), want_cache.float(), rtol=0, atol=0, equal_nan=True)
    real = int(case.batch.host_query_lens.sum())
    torch.testing.assert_close(out[:real], want[:real], rtol=rtol, atol=atol)


def split_rows(monkeypatch: pytest.MonkeyPatch, parts: int, min_span: int) -> None:
    """Has backends split all rows alike, however many there are and however short they are."""

    def launch(self: TritonAttention, num_rows: int, max_seq_len: int) -> DecodeLaunch:
        spec = self.spec
        sizes = decode.launch_for(spec.head_dim, spec.num_heads // spec.num_kv_heads, spec.dtype, parts)
        return replace(sizes, min_span=min_span)

    monkeypatch.setattr(TritonAttention, "decode_launch", launch)


def split_prompts(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Has backends split the keys of all rows of several new tokens alike."""
    before = TritonAttention.prompt_launch

    def launch(self: TritonAttention, query_lens: np.ndarray, seq_lens: np.ndarray) -> attention.Launch:
        return replace(before(self, query_lens, seq_lens), splits=parts)

    monkeypatch.setattr(TritonAttention, "prompt_launch", launch)
