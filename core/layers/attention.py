"""The attention layer of a model: its spec, and the backend and cache that the worker binds to it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec import structs
from torch import Tensor, nn

from frame.kv_scales.applied import attend_with, take_heads
from frame.kv_scales.calculated import measure

from ..interfaces.attention import AttentionBackend, AttentionSpec, BlockFormat, LayerParams
from ..interfaces.kv import AnyKVSpec, ChunkedKV, FullKV, SlidingKV
from ..interfaces.model import ForwardStep
from .cached import NO_CACHE, CachedLayer, Planner
from .chunked import ChunkPlanner
from .context import SharedContext
from .weights import WeightSlot

if TYPE_CHECKING:
    from .build import Build


class Attention(CachedLayer):
    """Attention over this rank's heads: over cached tokens, or of an encoder, where a row attends to itself alone.

    `sinks` [this rank's heads] are learned logits, read from "NAME.sinks"; `head_slice` says which of the model's
    heads these are. The scales of a cache of 8-bit floats come from the checkpoint where it has them, one for the layer
    or one for each KV head, of which this cache has those from number kv_heads[0] of kv_heads[1] on; else they are 1.
    `context` is the group of ranks that share the tokens of a row.
    """

    kv_scales: Tensor | None  # float32 [2, KV heads of the cache]
    #: whether the next tokens decide the scales
    measures = False

    def __init__(
        self,
        build: Build,
        name: str,
        spec: AttentionSpec,
        *,
        sinks: nn.Parameter | None = None,
        alibi_slopes: Tensor | None = None,
        distance_bias: Tensor | None = None,
        head_slice: slice = slice(0, 0),
        total_heads: int = 0,
        kv_heads: tuple[int, int] = (0, 0),
        context: SharedContext | None = None,
    ) -> None:
        super().__init__(build, name)
        self.spec = self.backend_spec = spec if context is None else context.spec
        self.context, self.group = context, build.groups.tensor
        self.of_encoder = spec.kind == "encoder"
        self.sinks = sinks
        self.head_slice, self.total_heads, self.kv_heads = head_slice, total_heads, kv_heads
        self.params = LayerParams(self.spec, None if context else sinks, alibi_slopes, distance_bias=distance_bias)
        self._backend: Planner | None = None
        quantized = spec.kind == "decoder" and spec.kv_dtype.itemsize == 1
        scales = torch.ones(2, self.spec.num_kv_heads, device=spec.device_type) if quantized else None
        self.register_buffer("kv_scales", scales)

    def kv_spec(self) -> AnyKVSpec | None:
        """What the layer caches of each token; None for an encoder's attention, which caches nothing."""
        spec = self.spec
        if spec.kind != "decoder":
            return None
        dtype = str(spec.kv_dtype).removeprefix("torch.")
        kept = FullKV(
            num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype, context_ranks=spec.context.ranks
        )
        if spec.chunk:
            return ChunkedKV(**structs.asdict(kept), chunk=spec.chunk)
        return SlidingKV(**structs.asdict(kept), window=spec.window) if spec.window else kept

    def planner(self, backend: Planner | None) -> Planner:
        found = super().planner(backend)
        return ChunkPlanner(cast("AttentionBackend", found), self.spec.chunk) if self.spec.chunk else found

    def bind(self, cache: Tensor | None, block: BlockFormat | None, plan: int, planner: Planner) -> None:
        super().bind(cache, block, plan, planner)
        self._backend = planner.backend if isinstance(planner, ChunkPlanner) else planner
        if isinstance(self._backend, AttentionBackend):
            self.params = replace(self.params, spec=self._backend.spec)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, step: ForwardStep) -> Tensor:  # type: ignore[override]
        """query [T, H, D], key and value [T, Hk, D] → [T, H · D]; stores key and value where there is a cache."""
        if self.measures:
            measure(self, key, value, step.batches[self.plan_index].slot_mapping)
        return super().forward(query, key, value, step=step).flatten(1)

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        """[T, H, D] for (query, key, value), by the backend."""
        query, key, value = tensors
        backend = cast("AttentionBackend", self._backend)
        cache = NO_CACHE if self.kv_cache is None else self.kv_cache
        attend = attend_with(backend, self.params)
        if self.context is None:
            return cast("Tensor", attend(query, key, value, cache, plan))
        out, lse = attend(*self.context.gather(query, key, value), cache, plan)
        return self.context.merge(out, lse, self.sinks)

    def weight_slots(self) -> list[WeightSlot]:
        slots = []
        if self.sinks is not None:
            slots.append(WeightSlot(f"{self.name}.sinks", (self.total_heads,), self.sinks, (self.head_slice,)))
        for index, part in enumerate("kv"):
            # as compressed-tensors, ModelOpt and AutoFP8 write them
            names = [f"{self.name}.{name}" for name in (f"{part}_scale", f"{part}_proj.{part}_scale", "kv_scale")]
            slots += [slot for name in names for slot in self._scale_slots(name, index)]
        slots.append(WeightSlot(f"{self.name}.q_scale", (), None))  # queries are not rounded
        return slots

    def _scale_slots(self, name: str, part: int) -> list[WeightSlot]:
        """One for a number, and one for each form that the scales of all KV heads may have."""
        first, total = self.kv_heads
        own, take = (slice(first, first + self.spec.num_kv_heads),), partial(take_heads, self.kv_scales, part)
        slots = [WeightSlot(name, (), self.kv_scales, region=(slice(part, part + 1),), optional=True)]
        forms: list[tuple[int, ...]] = [(total,), (total, 1, 1)] if total > 1 else [(1, 1, 1)]
        return slots + [WeightSlot(name, form, self.kv_scales, own, optional=True, take=take) for form in forms]

    def finish_load(self) -> None:
        """Takes over the scales that were loaded; raises `ValueError` for one that is not a positive number."""
        if self.kv_scales is None:
            return
        known = self.kv_scales.tolist()
        for part, scale in ((part, one) for part, scales in zip("kv", known, strict=True) for one in scales):
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"{self.name}.{part}_scale is {scale}; a scale of the KV cache must be above 0")
        by_head = isinstance(self.params.key_scale, Tensor) or any(len(set(scales)) > 1 for scales in known)
        key, value = self.kv_scales if by_head else [scales[0] for scales in known]
        self.params = replace(self.params, key_scale=key, value_scale=value)
