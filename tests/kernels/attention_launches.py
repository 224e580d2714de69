"""What attention layers launch, by backend, layer and batch; for `ahead`, which gives the tensors no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.attention import (
    AttentionSpec,
    GroupBatch,
    LayerParams,
    SharedPrefix,
)
from frame.interfaces import BackendSetup, ContextShare
from frame.kernels import decode_few, decode_narrow, latent_few, latent_hopper
from frame.kernels.decode_few import FewLaunch
from frame.kernels.decode_narrow import NarrowLaunch
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.attention.triton_options import TritonOptions

from .ahead import DEVICE

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LAYER = AttentionSpec(32, 8, 128, 128**-0.5, BF16, BF16, 16, "cuda")
ALL_FEATURES: dict[str, Any] = {"window": 1024, "soft_cap": 50.0, "sinks": True}

#: (tokens in the cache, new ones) of each row
Rows = list[tuple[int, int]]
#: One row's keys in most splits, in some, rows of which long ones are split, and so many that nothing is.
DECODES: dict[str, Rows] = {
    "one row": [(32768, 1)],
    "16 rows": [(4096, 1)] * 16,
    "48 rows": [(4096, 1)] * 48,
    "256 rows": [(1000, 1)] * 256,
}
PROMPTS: Rows = [(0, 1000), (500, 300), (100, 1)]


def layer(**changes: Any) -> AttentionSpec:
    """The usual layer with some fields changed; the cache's type follows the layer's."""
    if "dtype" in changes:
        changes.setdefault("kv_dtype", changes["dtype"])
    return replace(LAYER, **changes)


def attend(spec: AttentionSpec, rows: Rows, *, shared: bool = False, head_scales: bool = False, **options: Any) -> None:
    """One step of a layer; with `shared` its rows begin alike, with `head_scales` each KV head has its own scales."""
    if reason := TritonAttention.supports(spec):
        raise ValueError(reason)
    backend = TritonAttention(BackendSetup(spec, SimpleNamespace()), TritonOptions(**options))
    tokens = sum(count for _, count in rows)
    heads, dim = spec.num_heads, spec.head_dim
    params = LayerParams(
        spec,
        sinks=_empty(heads, dtype=spec.dtype) if spec.sinks else None,
        alibi_slopes=_empty(heads, dtype=F32) if spec.alibi else None,
    )
    if head_scales:
        scales = _empty(2, spec.num_kv_heads, dtype=F32)
        params = replace(params, key_scale=scales[0], value_scale=scales[1])
    projected = _empty(tokens, heads + 2 * spec.num_kv_heads, dim, dtype=spec.dtype)
    query, key, value = projected.split([heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    block = TritonAttention.kv_format(spec)
    cache = block.view(_empty(64, block.num_bytes, dtype=torch.uint8))
    batch = batch_of(rows, shared)
    backend.forward(params, query, key, value, cache, backend.plan(batch))


def batch_of(rows: Rows, shared: bool = False) -> GroupBatch:
    """The batch of such rows; with `shared` they begin alike."""
    counts = np.array([count for _, count in rows], np.int32)
    lengths = np.array([sum(row) for row in rows], np.int32)
    prefix = None
    if shared:
        tiles = -(-len(rows) // TritonAttention.prefix_tile_rows)
        prefix = SharedPrefix(_int32(tiles, TritonAttention.prefix_tile_rows), _int32(tiles), _int32(len(rows)))
    return GroupBatch(
        num_tokens=int(counts.sum()),
        query_start=_int32(len(rows) + 1),
        seq_lens=_int32(len(rows)),
        block_table=_int32(len(rows), 4096),
        slot_mapping=_empty(int(counts.sum()), dtype=torch.int64),
        host_query_lens=counts,
        host_seq_lens=lengths,
        max_query_len=int(counts.max()),
        max_seq_len=int(lengths.max()),
        prefix=prefix,
    )


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def _int32(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


#: Layers that differ from the usual one.
LAYERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "one head a KV head": {"num_kv_heads": 32},
    "7 heads a KV head": {"num_heads": 28, "num_kv_heads": 4},
    "16 heads a KV head": {"num_heads": 64, "num_kv_heads": 4},
    "48 heads, one KV head": {"num_heads": 48, "num_kv_heads": 1},
    "head of 64": {"head_dim": 64},
    "head of 80": {"head_dim": 80},
    "head of 96": {"head_dim": 96},
    "head of 256": {"head_dim": 256},
    "head of 256, 8 heads a KV head": {"head_dim": 256, "num_heads": 16, "num_kv_heads": 2},
    "window": {"window": 1024},
    "soft cap": {"soft_cap": 50.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "window, soft cap, sinks": ALL_FEATURES,
    "window, soft cap, sinks, head of 256": {**ALL_FEATURES, "head_dim": 256},
    "window, sinks, head of 64": {"window": 128, "sinks": True, "head_dim": 64, "num_heads": 64},
    "float16": {"dtype": F16},
    "float32": {"dtype": F32},
    "float32, head of 256": {"dtype": F32, "head_dim": 256},
    "log-sum-exps": {"returns_lse": True},
    "log-sum-exps of a share": {"returns_lse": True, "context": ContextShare(2, 1)},
    "log-sum-exps of a share, window": {"returns_lse": True, "context": ContextShare(2, 1), "window": 1024},
    "e4m3 cache": {"kv_dtype": E4M3},
    "e5m2 cache": {"kv_dtype": E5M2},
    "e4m3 cache, head of 64": {"kv_dtype": E4M3, "head_dim": 64},
    "e4m3 cache, head of 96": {"kv_dtype": E4M3, "head_dim": 96},
    "e4m3 cache, head of 256": {"kv_dtype": E4M3, "head_dim": 256},
    "e4m3 cache, window, soft cap, sinks": {"kv_dtype": E4M3, **ALL_FEATURES},
    "e5m2 cache, float16, alibi": {"dtype": F16, "kv_dtype": E5M2, "alibi": True},
    "e4m3 cache, float32": {"dtype": F32, "kv_dtype": E4M3},
    "e4m3 cache, scales of heads": {"kv_dtype": E4M3},
    "e5m2 cache, float16, alibi, scales of heads": {"dtype": F16, "kv_dtype": E5M2, "alibi": True},
    "blocks of 1": {"block_size": 1},
    "blocks of 32": {"block_size": 32},
    "blocks of 256": {"block_size": 256},
}
#: Layers of which every kind of step is compiled; of the others, those that differ most.
THOROUGH = (
    "usual", "head of 256", "float32", "e4m3 cache", "e4m3 cache, scales of heads", "window, soft cap, sinks"
)  # fmt: skip
#: What the Hopper kernel serves.
HOPPER_LAYERS = (
    "usual", "7 heads a KV head", "head of 64", "head of 80", "head of 96", "head of 256", "window",
    "window, soft cap, sinks", "window, soft cap, sinks, head of 256", "window, sinks, head of 64", "float16",
    "blocks of 32", "blocks of 256",
)  # fmt: skip
PERSISTENT_LAYERS = ("usual", "head of 64", "head of 96", "window, soft cap, sinks, head of 256")


def attention_launches(name: str) -> dict[str, Callable[[], None]]:
    """Steps of a layer of LAYERS without the Hopper kernel."""
    spec, step = layer(**LAYERS[name]), partial(attend, head_scales="scales of heads" in name)
    thorough = name in THOROUGH
    decodes = DECODES if thorough else {rows: DECODES[rows] for rows in ("one row", "16 rows", "256 rows")}
    found = {f"{name}, {rows}": partial(step, spec, counts) for rows, counts in decodes.items()}
    found[f"{name}, prompts"] = partial(step, spec, PROMPTS[:2], hopper_prefill=False)
    if thorough:
        found[f"{name}, few new tokens"] = partial(step, spec, [(32768, 16), (4096, 5)])
        found[f"{name}, deterministic"] = partial(step, replace(spec, deterministic=True), [(100, 1), *PROMPTS])
    if not spec.window and (thorough or spec.alibi or name == "one head a KV head"):
        found[f"{name}, 16 rows, shared prefix"] = partial(step, spec, DECODES["16 rows"], shared=True)
        found[f"{name}, 256 rows, shared prefix"] = partial(step, spec, DECODES["256 rows"], shared=True)
    return found


def hopper_launches() -> dict[str, Callable[[], None]]:
    """Prompts by the Hopper kernel."""
    rows = PROMPTS[:2]
    found: dict[str, Callable[[], None]] = {}
    for name in HOPPER_LAYERS:
        found[f"{name}, Hopper prompts"] = partial(attend, layer(**LAYERS[name]), rows, persistent_prefill=False)
    for name in PERSISTENT_LAYERS:
        found[f"{name}, persistent Hopper prompts"] = partial(
            attend, layer(**LAYERS[name]), rows, persistent_prefill=True
        )
    for name in ("e4m3 cache", "e4m3 cache, scales of heads"):  # over pages of 16 bits
        heads = "scales of heads" in name
        found[f"{name}, wide Hopper prompts"] = partial(attend, layer(**LAYERS[name]), rows, head_scales=heads)
    for launch in (NarrowLaunch(1), NarrowLaunch(4), NarrowLaunch(16, groups=1)):
        found[f"narrow decodes, {launch.splits} splits, {launch.groups} groups"] = partial(narrow, launch)
    for heads, splits in ((16, 4), (128, 1), (128, 2)):
        found[f"latents of {heads} heads, Hopper, {splits} splits"] = partial(latents, latent_hopper, heads, splits)
    for heads, splits in ((16, 1), (16, 4), (8, 4)):
        found[f"latents of few heads ({heads}), Hopper, {splits} splits"] = partial(latents, latent_few, heads, splits)
    for name, (heads, kv_heads, dim, more) in FEW_LAYERS.items():
        for launch in FEW_LAUNCHES:
            if launch.num_warps != 16 or dim == 64:
                found[f"few decodes, {name}, {launch}"] = partial(few, launch, heads, kv_heads, dim, **more)
    for name in ("usual", "sinks", "window, sinks, head of 64", "head of 80", "16 heads a KV head", "float16"):
        found[f"few decodes as planned, {name}"] = partial(attend, layer(**LAYERS[name]), [(1000, 1)])
        rows = [(32768, 1)] * 4
        found[f"few decodes as planned, {name}, long rows"] = partial(
            attend, layer(**LAYERS[name]), rows, few_decodes=True
        )
    found["narrow decodes, scales of heads"] = partial(narrow, NarrowLaunch(2), head_scales=True)
    return found


#: Query heads, KV heads, their size, and what else the layer has, by name.
FEW_LAYERS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "4 heads a KV head": (32, 8, 128, {}),
    "8 heads a KV head": (32, 4, 128, {}),
    "2 heads a KV head": (16, 8, 128, {}),
    "head of 64, window, sinks": (64, 8, 64, {"window": 128, "sinks": True}),
    "head of 64, sinks": (64, 8, 64, {"sinks": True}),
}
#: The kinds that `benchmarks/kernels/few_decodes.py` measures.
FEW_LAUNCHES = (
    FewLaunch(64, 8), FewLaunch(128, 8), FewLaunch(64, 8, 16, 128), FewLaunch(128, 8, 16, 256),
    FewLaunch(128, 8, 16, 256, early=False, lets_in=False), FewLaunch(32, 4, 32, 64), FewLaunch(128, 16, 16, 256),
    FewLaunch(64, 4, 64, 128), FewLaunch(32, 8, 64, 64),
)  # fmt: skip


def few(
    launch: FewLaunch, heads: int, kv_heads: int, dim: int, rows: int = 2, *, window: int = 0, sinks: bool = False
) -> None:
    """Decodes that read cached keys before they wait."""
    query, key = (_empty(rows, count, dim, dtype=BF16) for count in (heads, kv_heads))
    decode_few.decode_attention(
        query, key, key, _empty(2, 64, 16, kv_heads, dim, dtype=BF16), _empty(rows, dtype=torch.int64), _int32(rows),
        _int32(rows, 512), scale=0.1, out=query, launch=launch, arrivals=_int32(kv_heads * rows), window=window,
        sinks=_empty(heads, dtype=BF16) if sinks else None,
    )  # fmt: skip


def latents(kernel: ModuleType, heads: int, splits: int, rows: int = 8) -> None:
    """Latent attention by a kernel for Hopper."""
    query, latent = _empty(rows, heads, 576, dtype=BF16), _empty(rows, 576, dtype=BF16)
    kernel.latent_decode(
        query, latent, _empty(64, 16, 576, dtype=BF16), _empty(rows, dtype=torch.int64), _int32(rows), _int32(rows),
        _int32(rows, 512), scale=0.1, splits=splits,
    )  # fmt: skip


def narrow(launch: NarrowLaunch, rows: int = 64, *, head_scales: bool = False) -> None:
    """Decodes over a cache of e4m3 in registers."""
    query, key = (_empty(rows, heads, 128, dtype=BF16) for heads in (32, 8))
    cache = _empty(2, 64, 16, 8, 128, dtype=E4M3)
    by_head = {"key_scale": _empty(8, dtype=F32), "value_scale": _empty(8, dtype=F32)} if head_scales else {}
    decode_narrow.decode_attention(
        query, key, key, cache, _empty(rows, dtype=torch.int64), _int32(rows), _int32(rows, 512), scale=0.1,
        out=query, launch=launch, arrivals=_int32(8 * rows), order=_int32(rows), **by_head,
    )  # fmt: skip
