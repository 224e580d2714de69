"""Why a backend cannot serve a layer of latent attention or of its index: every reason. What its kernels run on."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from frame.interfaces import IndexSpec, LatentSpec

from .reasons import name_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Numbers of a latent, padded, beyond which a program's registers hold no sum of 64 heads.
MAX_RANK = 512
#: Heads of an index, and numbers of its keys, that a program multiplies at once.
MAX_INDEX_HEADS, MAX_INDEX_DIM = 128, 256


def latent_reasons(spec: LatentSpec | IndexSpec, dtypes: Collection[torch.dtype] = FLOATS) -> list[str]:
    """Sizes first, then types. A latent is cached as it is computed, or its first part as e4m3."""
    found = []
    sizes: dict[str, int] = {"heads": spec.num_heads, "tokens of a block": spec.block_size}
    if isinstance(spec, LatentSpec):
        sizes |= {"numbers of a latent": spec.rank, "numbers of a value": spec.value_dim}
    else:
        sizes |= {"numbers of a key": spec.head_dim, "chosen tokens": spec.top_k}
    found += [f"{count} {what} not supported" for what, count in sizes.items() if count < 1]
    if spec.dtype not in dtypes:
        found.append(f"dtype {name_of(spec.dtype)} not supported (there are: {', '.join(map(name_of, dtypes))})")
    own, eight = name_of(spec.dtype), isinstance(spec, LatentSpec) and spec.kv_dtype == torch.float8_e4m3fn
    if spec.kv_dtype != spec.dtype and not eight:
        kind = "latent attention" if isinstance(spec, LatentSpec) else "the index of sparse attention"
        also = " or float8_e4m3fn" if isinstance(spec, LatentSpec) else ""
        found.append(
            f"KV-cache dtype {name_of(spec.kv_dtype)} not supported by {kind}, which caches {own}{also} "
            "(set kv_cache_dtype to auto)"
        )
    if eight and isinstance(spec, LatentSpec) and spec.rank % spec.dtype.itemsize:  # behind which such numbers lie
        found.append(f"{spec.rank} numbers of 8 bits before numbers of {own} not supported")
    if spec.context.ranks > 1:
        found.append("a share of the context not supported")
    return found


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernel_reasons(spec: LatentSpec | IndexSpec, *others: str) -> list[str]:
    """As `latent_reasons`, of our own kernels; `others` are reasons too, unless empty."""
    interpreted = is_interpreted()
    # The interpreter multiplies bfloat16 as if its bits were integers.
    dtypes = FLOATS[:3] if spec.device_type == "cuda" or not interpreted else (torch.float16, torch.float32)
    found = latent_reasons(spec, dtypes)
    if isinstance(spec, LatentSpec):
        most = {"latents of {} numbers": (spec.rank, MAX_RANK)}
    else:
        most = {"{} heads": (spec.num_heads, MAX_INDEX_HEADS), "keys of {} numbers": (spec.head_dim, MAX_INDEX_DIM)}
    found += [
        f"{what.format(count)} not supported (at most {limit})"
        for what, (count, limit) in most.items()
        if count > limit
    ]
    found += filter(None, others)
    if spec.device_type != "cuda" and not interpreted:
        found.append(f"device {spec.device_type!r} not supported (there are: cuda)")
    return found


def num_multiprocessors(device_type: str) -> int:
    """Of the device that is current; 1 where there is none."""
    if device_type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
