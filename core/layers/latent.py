"""Layers of multi-head latent attention, and the index that chooses the tokens of its sparse form.

Both keep one vector for each token, the same on every tensor rank. Knows no checkpoint but the name of one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..interfaces.kv import LatentKV
from ..interfaces.latent import IndexBackend, IndexSpec, LatentBackend, LatentParams, LatentSpec
from ..interfaces.model import ForwardStep
from .cached import NO_CACHE, CachedLayer

if TYPE_CHECKING:
    from .build import Build


class UpWeights(nn.Module):
    """What `linear` [rank → heads · width] multiplies with, as `weight` [heads, width, rank] of the model's dtype.

    It is the linear layer's own weight where that is plain; of a layer that keeps it in another form it is a copy, the
    product with the unit matrix, made each time when the weights have arrived.
    """

    def __init__(self, build: Build, linear: nn.Module, spec: LatentSpec) -> None:
        super().__init__()
        self._linear = (linear,)  # not a part of this module: its weights have arrived by then
        self._shape, self._dtype = (spec.num_heads, spec.nope_dim + spec.value_dim, spec.rank), spec.dtype
        own = self._own()
        self.weight = torch.empty(self._shape, dtype=spec.dtype, device=build.device) if own is None else own

    def finish_load(self) -> None:
        """Called when the last weight has arrived, and after every later change of the weights."""
        own = self._own()
        if own is not None:
            self.weight = own
            return
        ones = torch.eye(self._shape[2], dtype=self._dtype, device=self.weight.device)
        self.weight.copy_(self._linear[0](ones).t().view(self._shape))  # recorded steps hold the address

    def _own(self) -> Tensor | None:
        weight: Any = getattr(self._linear[0], "weight", None)
        heads, width, rank = self._shape
        if not isinstance(weight, Tensor) or (weight.dtype, weight.shape) != (self._dtype, (heads * width, rank)):
            return None
        plain: Tensor = weight.to_dense() if weight.is_mkldnn else weight
        return plain.detach().view(self._shape)


class LatentAttention(CachedLayer):
    """Attention of this rank's heads over latents, each of which stands for the key and value of all heads.

    `up` is the layer that makes keys and values of latents, for this rank's heads. Raises `ValueError` where devices
    are to share the context of a request.
    """

    def __init__(self, build: Build, name: str, spec: LatentSpec, up: nn.Module) -> None:
        super().__init__(build, name)
        _refuse_shared_context(build, name)
        self.spec = self.backend_spec = spec
        self.up = up
        self.made = UpWeights(build, up, spec)

    def kv_spec(self) -> LatentKV:
        return latent_kv(self.spec)

    def forward(  # type: ignore[override]
        self, query: Tensor, latent: Tensor, step: ForwardStep, chosen: Tensor | None = None
    ) -> Tensor:
        """query [T, H, nope + rope], latent [T, rank + rope] → [T, H · value_dim]; stores the latents.

        `chosen` int32 [T, top_k] are the positions that each token attends to, where the spec has `top_k`.
        """
        tensors = (query, latent) if chosen is None else (query, latent, chosen)
        return super().forward(*tensors, step=step).flatten(1)

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        """[T, H, value_dim] for (query, latent) or (query, latent, chosen), by the backend."""
        query, latent, *chosen = tensors
        cache = NO_CACHE if self.kv_cache is None else self.kv_cache
        params = LatentParams(self.spec, self.made.weight)
        backend = cast("LatentBackend", self.planned_by)
        return backend.forward(params, query, latent, cache, plan, chosen[0] if chosen else None)


class SparseIndex(CachedLayer):
    """Chooses the tokens that each token attends to, by small queries and keys of their own; alike on every rank."""

    def __init__(self, build: Build, name: str, spec: IndexSpec) -> None:
        super().__init__(build, name)
        _refuse_shared_context(build, name)
        self.spec = self.backend_spec = spec

    def kv_spec(self) -> LatentKV:
        return latent_kv(self.spec)

    def forward(self, query: Tensor, weights: Tensor, key: Tensor, step: ForwardStep) -> Tensor:  # type: ignore[override]
        """query [T, H, D], weights [T, H], key [T, D] → int32 [T, top_k], -1 where there are fewer tokens."""
        return super().forward(query, weights, key, step=step)

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        """What `IndexBackend.forward` gives."""
        query, weights, key = tensors
        backend, cache = cast("IndexBackend", self.planned_by), self.kv_cache
        return backend.forward(self.spec, query, weights, key, NO_CACHE if cache is None else cache, plan)


def latent_kv(spec: LatentSpec | IndexSpec) -> LatentKV:
    """What a layer that asks for `spec` keeps of a token: a latent, or a key of the index."""
    dtype = str(spec.kv_dtype).removeprefix("torch.")
    if isinstance(spec, IndexSpec):
        return LatentKV(dim=spec.head_dim, dtype=dtype)
    extra = spec.turned_bytes
    return LatentKV(dim=spec.rank if extra else spec.width, dtype=dtype, extra_bytes=extra)


def _refuse_shared_context(build: Build, name: str) -> None:
    ranks = build.groups.decode_context.size
    if ranks > 1:
        raise ValueError(
            f"{name} is latent attention, of whose cache every device has all tokens: {ranks} devices cannot share the "
            "context of a request"
        )
