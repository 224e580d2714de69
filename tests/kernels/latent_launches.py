"""What layers of latent attention launch, by layer and batch; for `ahead`, which gives the tensors no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from frame.interfaces import BackendSetup, LatentParams, LatentSpec
from frame.plugins.attention.triton_latent import TritonLatent

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


def attend(spec: LatentSpec, rows: Rows) -> None:
    """One step of a layer."""
    if reason := TritonLatent.supports(spec):
        raise ValueError(reason)
    backend = TritonLatent(BackendSetup(spec, SimpleNamespace()))  # type: ignore[arg-type]
    tokens = sum(count for _, count in rows)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=spec.dtype, device=DEVICE)

    params = LatentParams(spec, empty(spec.num_heads, spec.nope_dim + spec.value_dim, spec.rank))
    query, latent = empty(tokens, spec.num_heads, spec.nope_dim + spec.rope_dim), empty(tokens, spec.width)
    block = TritonLatent.kv_format(spec)
    cache = block.view(torch.empty(64, block.num_bytes, dtype=torch.uint8, device=DEVICE))
    backend.forward(params, query, latent, cache, backend.plan(batch_of(rows)), None)


def latent_launches() -> dict[str, Callable[[], None]]:
    """Decodes in parts and whole, and prompts with and without what is cached."""
    found: dict[str, Callable[[], None]] = {}
    for name, changes in LAYERS.items():
        spec = replace(LAYER, **changes)
        for rows in ("one row", "256 rows"):
            found[f"latent, {name}, {rows}"] = partial(attend, spec, DECODES[rows])
        found[f"latent, {name}, prompts"] = partial(attend, spec, PROMPTS)
    return found
