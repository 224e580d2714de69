"""Scales of a KV cache of 8-bit floats that are tensors, also for attention backends that take numbers only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor

from frame.core.interfaces.attention import AttentionBackend, LayerParams


def attend_with(backend: AttentionBackend, layer: LayerParams) -> Callable[..., Any]:
    """`forward` of the backend for a layer: called with (query, key, value, kv_cache, plan)."""
    if isinstance(layer.key_scale, Tensor) and not backend.takes_head_scales:
        return partial(attend_scaled, backend, layer)
    return partial(backend.forward, layer)


def take_heads(scales: Tensor | None, part: int, heads: Tensor) -> None:
    """Puts a checkpoint's scales `heads` [n] or [n, 1, 1] into row `part` of `scales` [2, n], where there are some."""
    if scales is not None:
        scales.data[part] = heads.flatten()


def attend_scaled(
    backend: AttentionBackend,
    layer: LayerParams,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    plan: Any,
) -> Any:
    """What `forward` gives, called with scales of 1, and with queries, keys and values that have theirs already.

    They are rounded to the model's type once more, which powers of two leave as they are.
    """
    key_scale, value_scale = (cast("Tensor", one)[:, None] for one in (layer.key_scale, layer.value_scale))

    def times(heads: Tensor, scale: Tensor) -> Tensor:
        found: Tensor = heads.unflatten(1, (len(scale), -1)) * scale[:, None]
        return found.flatten(1, 2).to(heads.dtype)

    params = replace(layer, key_scale=1.0, value_scale=1.0)
    scaled = times(query, key_scale), times(key, 1 / key_scale), times(value, 1 / value_scale)
    out = backend.forward(params, *scaled, kv_cache, plan)
    return (times(out[0], value_scale), out[1]) if isinstance(out, tuple) else times(out, value_scale)
