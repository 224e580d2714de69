"""The attention layer of a model: its spec, and the backend and cache that the worker binds to it.

Knows no projection, no position encoding and no request.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..interfaces.attention import AttentionBackend, AttentionSpec, LayerParams
from ..interfaces.kv import AnyKVSpec, FullKV, SlidingKV
from ..interfaces.model import ForwardStep
from .weights import WeightSlot


class Attention(nn.Module):
    """Attention over this rank's heads, paged or of a row over itself. `name` is the prefix, unique in a model.

    `sinks` [this rank's heads] are learned logits, read from "NAME.sinks"; `head_slice` says which of the model's
    heads these are.
    """

    kv_cache: Tensor

    def __init__(
        self,
        name: str,
        spec: AttentionSpec,
        *,
        sinks: nn.Parameter | None = None,
        alibi_slopes: Tensor | None = None,
        head_slice: slice = slice(0, 0),
        total_heads: int = 0,
    ) -> None:
        super().__init__()
        self.name, self.spec = name, spec
        self.sinks = sinks
        self.head_slice, self.total_heads = head_slice, total_heads
        self.params = LayerParams(spec, sinks, alibi_slopes)
        self.group = -1
        self.backend: AttentionBackend | None = None

    @property
    def keeps_tokens(self) -> bool:
        """Whether it has a KV cache."""
        return self.spec.kind == "decoder"

    def kv_spec(self) -> AnyKVSpec:
        """What this layer keeps per token."""
        spec = self.spec
        dtype = str(spec.kv_dtype).removeprefix("torch.")
        if spec.window:
            return SlidingKV(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype, window=spec.window)
        return FullKV(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype)

    def bind(self, group: int, backend: AttentionBackend, kv_cache: Tensor) -> None:
        """Called by the worker once memory is there, and again when it moved.

        `group` is the number of its plan in a step; layers without a cache get an empty one.
        """
        self.group, self.backend, self.kv_cache = group, backend, kv_cache

    def forward(self, query: Tensor, key: Tensor, value: Tensor, step: ForwardStep) -> Tensor:
        """query [T, H, D], key and value [T, Hk, D] → [T, H · D]; stores key and value where there is a cache."""
        if self.backend is None:
            raise RuntimeError(f"attention layer {self.name!r} has no backend: bind() was not called")
        step.hooks.before(self.name)
        out = self.backend.forward(self.params, query, key, value, self.kv_cache, step.plans[self.group])
        step.hooks.after(self.name)
        return out.flatten(1)

    def weight_slots(self) -> list[WeightSlot]:
        if self.sinks is None:
            return []
        return [WeightSlot(f"{self.name}.sinks", (self.total_heads,), self.sinks, (self.head_slice,))]


def local_slopes(slopes: Tensor | None, heads: slice, device: torch.device) -> Tensor | None:
    """The part of this rank of per-head ALiBi slopes [heads of the model], in float32."""
    return None if slopes is None else slopes[heads].to(device=device, dtype=torch.float32)
