"""What layers of latent attention launch, by layer and batch; for `ahead`, which gives the tensors no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from frame.interfaces import BackendSetup, IndexSpec, LatentBackend, LatentParams, LatentSpec
from frame.plugins.attention.triton_latent import TritonLatent
from frame.plugins.attention.triton_sparse import TritonIndex, TritonSparse

from .ahead import DEVICE
from .attention_launches import DECODES, PROMPTS, Rows, batch_of

BF16, F32 = torch.bfloat16, torch.float32
#: DeepSeek V2-Lite, and V3 on eight ranks.
LAYER = LatentSpec(16, 128, 64, 128, 512, 192**-0.5, BF16, BF16, 16, "cuda")
LAYERS: dict[str, dict[str, Any]] = {
    "16 heads": {},
    "32 heads": {"num_heads": 32},
    "128 heads": {"num_heads": 128},
    "20 heads, values of 256": {"num_heads": 20, "nope_dim": 192, "value_dim": 256},
    "40 heads, latents of 288": {"num_heads": 40, "nope_dim": 64, "rope_dim": 32, "value_dim": 64, "rank": 256},
    "16 heads, float32": {"dtype": F32, "kv_dtype": F32},
    "16 heads, e4m3 cache": {"kv_dtype": torch.float8_e4m3fn},
    "128 heads, e4m3 cache": {"num_heads": 128, "kv_dtype": torch.float8_e4m3fn},
}
#: DeepSeek V3.2 on one rank and on eight, and GLM-5.
SPARSE: dict[str, dict[str, Any]] = {
    "128 heads": {"num_heads": 128},
    "16 heads": {},
    "64 heads, values of 256": {"num_heads": 64, "nope_dim": 192, "value_dim": 256},
    "16 heads, float32": {"dtype": F32, "kv_dtype": F32},
}
#: (heads, numbers of a key) of an index: DeepSeek V3.2's and GLM-5's.
INDEXES = ((64, 128), (32, 128))


def attend(kind: type[LatentBackend], spec: LatentSpec, rows: Rows) -> None:
    """One step of a layer."""
    if reason := kind.supports(spec):
        raise ValueError(reason)
    backend = kind(BackendSetup(spec, SimpleNamespace()))  # type: ignore[arg-type]
    tokens = sum(count for _, count in rows)
    params = LatentParams(spec, _empty(spec, spec.num_heads, spec.nope_dim + spec.value_dim, spec.rank))
    query = _empty(spec, tokens, spec.num_heads, spec.nope_dim + spec.rope_dim)
    block, latent = kind.kv_format(spec), _empty(spec, tokens, spec.width)
    cache = block.view(torch.empty(64, block.num_bytes, dtype=torch.uint8, device=DEVICE))
    chosen = torch.empty((tokens, spec.top_k), dtype=torch.int32, device=DEVICE) if spec.top_k else None
    backend.forward(params, query, latent, cache, backend.plan(batch_of(rows)), chosen)


def choose(heads: int, dim: int, rows: Rows, dtype: torch.dtype = BF16) -> None:
    """One step of an index."""
    spec = IndexSpec(heads, dim, 2048, dim**-0.5, dtype, dtype, 16, "cuda")
    if reason := TritonIndex.supports(spec):
        raise ValueError(reason)
    backend, tokens = TritonIndex(BackendSetup(spec, SimpleNamespace())), sum(count for _, count in rows)  # type: ignore[arg-type]
    query, weights, key = _empty(spec, tokens, heads, dim), _empty(spec, tokens, heads), _empty(spec, tokens, dim)
    backend.forward(spec, query, weights, key, _empty(spec, 64, 16, dim), backend.plan(batch_of(rows)))


def _empty(spec: LatentSpec | IndexSpec, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=spec.dtype, device=DEVICE)


def latent_launches() -> dict[str, Callable[[], None]]:
    """Decodes in parts and whole, and prompts with and without what is cached."""
    found: dict[str, Callable[[], None]] = {}
    for name, changes in LAYERS.items():
        spec = replace(LAYER, **changes)
        for rows in ("one row", "256 rows"):
            found[f"latent, {name}, {rows}"] = partial(attend, TritonLatent, spec, DECODES[rows])
        found[f"latent, {name}, prompts"] = partial(attend, TritonLatent, spec, PROMPTS)
    for name, changes in SPARSE.items():
        spec = replace(LAYER, top_k=2048, **changes)
        found[f"sparse latents, {name}, one row"] = partial(attend, TritonSparse, spec, DECODES["one row"])
        found[f"sparse latents, {name}, prompts"] = partial(attend, TritonSparse, spec, PROMPTS)
    for heads, dim in INDEXES:
        found[f"index, {heads} heads"] = partial(choose, heads, dim, DECODES["16 rows"])
    found["index in float32"] = partial(choose, 64, 128, DECODES["16 rows"], F32)
    return found
