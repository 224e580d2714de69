"""Why a backend cannot serve a layer of latent attention or of its index: every reason."""

from __future__ import annotations

from collections.abc import Collection

import torch

from frame.interfaces import IndexSpec, LatentSpec

from .reasons import name_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def latent_reasons(spec: LatentSpec | IndexSpec, dtypes: Collection[torch.dtype] = FLOATS) -> list[str]:
    """Sizes first, then types. A latent is cached as it is computed."""
    found = []
    sizes: dict[str, int] = {"heads": spec.num_heads, "tokens of a block": spec.block_size}
    if isinstance(spec, LatentSpec):
        sizes |= {"numbers of a latent": spec.rank, "numbers of a value": spec.value_dim}
    else:
        sizes |= {"numbers of a key": spec.head_dim, "chosen tokens": spec.top_k}
    found += [f"{count} {what} not supported" for what, count in sizes.items() if count < 1]
    if spec.dtype not in dtypes:
        found.append(f"dtype {name_of(spec.dtype)} not supported (there are: {', '.join(map(name_of, dtypes))})")
    if spec.kv_dtype != spec.dtype:
        found.append(
            f"KV-cache dtype {name_of(spec.kv_dtype)} not supported by latent attention, which caches "
            f"{name_of(spec.dtype)} (set kv_cache_dtype to auto)"
        )
    if spec.context.ranks > 1:
        found.append("a share of the context not supported")
    return found
