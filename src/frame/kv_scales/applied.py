"""Scales of a KV cache of 8-bit floats that are tensors, for attention backends that take numbers only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from frame.core.interfaces.attention import AttentionBackend, LayerParams


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
