"""How long attention backends want blocks to be.

Backends of other packages are loaded and asked, which imports torch; frame's own are not, since "auto" never takes one
of them that asks for a block size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING

from frame.settings import Checkpoint, FrameConfig, PluginError, Registry, read_model_config

from .layers import Shape
from .machine import Device
from .memory import Sizes

if TYPE_CHECKING:
    from frame.interfaces import AnyKVSpec, CacheBackend, CacheSpec


def block_multiples(
    config: FrameConfig, checkpoint: Checkpoint, shape: Shape, sizes: Sizes, device: Device
) -> tuple[dict[str, int], str]:
    """Returns the multiple of tokens in a block for each layer where that is not 1, and why it is unknown, or ""."""
    registry = Registry.load()
    if not shape.kv_specs or _asks_none(config, registry):
        return {}, ""
    specs = {
        layer: _spec(checkpoint, shape, sizes, device, kept)
        for layer, kept in shape.kv_specs.items()
        if kept.retention[0] != "state"  # which no backend keeps
    }
    return _multiples(config, registry, specs)


def multiples_of(config: FrameConfig, specs: Mapping[str, CacheSpec], device: Device) -> tuple[dict[str, int], str]:
    """As `block_multiples`, for what the layers of one of several ranks ask of their backends."""
    registry = Registry.load()
    if _asks_none(config, registry):
        return {layer: spec.context.ranks for layer, spec in specs.items() if spec.context.ranks > 1}, ""
    return _multiples(
        config, registry, {layer: replace(spec, device_type=device.kind) for layer, spec in specs.items()}
    )


def _asks_none(config: FrameConfig, registry: Registry) -> bool:
    """Whether no backend that may be chosen asks for long blocks."""
    ours = all(provider.target.startswith("frame.plugins.") for provider in registry.providers("attention"))
    return config.attention.attention_backend == "auto" and ours


def _multiples(config: FrameConfig, registry: Registry, specs: Mapping[str, CacheSpec]) -> tuple[dict[str, int], str]:
    chosen: dict[CacheSpec, int] = {}
    name, size = config.attention.attention_backend, config.cache.block_size
    try:
        for spec in specs.values():
            if spec not in chosen:
                chosen[spec] = _multiple(registry, name, spec, size) * spec.context.ranks
    except PluginError as error:
        return {}, str(error)
    return {layer: chosen[spec] for layer, spec in specs.items() if chosen[spec] > 1}, ""


def _spec(checkpoint: Checkpoint, shape: Shape, sizes: Sizes, device: Device, kept: AnyKVSpec) -> CacheSpec:
    import torch

    from frame.interfaces import AttentionSpec, FullKV, IndexSpec, LatentSpec

    dtype, kv_dtype = getattr(torch, sizes.dtype), getattr(torch, sizes.kv_dtype)
    if isinstance(kept, FullKV):
        return AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=kept.num_kv_heads,
            head_dim=kept.head_dim,
            scale=kept.head_dim**-0.5,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=0,
            device_type=device.kind,
            window=getattr(kept, "window", 0),
            soft_cap=float(checkpoint.text.get("attn_logit_softcapping") or 0.0),
        )
    config, dim = read_model_config(checkpoint, Registry.load()), getattr(kept, "dim", 0)
    top_k = int(getattr(config, "index_topk", None) or 0)
    rank, rope, nope = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
    if dim != rank + rope:
        return IndexSpec(config.index_n_heads, dim, top_k, dim**-0.5, dtype, kv_dtype, 0, device.kind)
    heads, value, scale = shape.num_heads, config.v_head_dim, (nope + rope) ** -0.5
    return LatentSpec(heads, nope, rope, value, rank, scale, dtype, kv_dtype, 0, device.kind, top_k)


def _multiple(registry: Registry, name: str, spec: CacheSpec, block_size: int) -> int:
    from frame.interfaces import why_not_served

    if name != "auto" and not isinstance(spec, registry.resolve(registry.choose("attention", name)).spec_type):
        name = "auto"  # the user names one of another kind
    refuses, ranks = partial(why_not_served, spec=spec, block_size=block_size), methodcaller("preference", spec)
    backend: type[CacheBackend] = registry.resolve(registry.select("attention", name, refuses, ranks))
    return backend.block_multiple(spec)
