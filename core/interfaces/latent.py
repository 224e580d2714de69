"""Backends of multi-head latent attention (DeepSeek-AI 2024): one vector a token stands for the keys of all heads.

A latent is [c; k], c of `rank` numbers, from which each head's key and value are products, and k of `rope_dim` numbers,
the turned key that all heads share. A head's query is [q; r], and its score (q · (W_k c) + r · k) · scale. Knows no
model.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .attention import AttentionSpec, BlockFormat, CacheBackend, ContextShare

#: The caches of these layers hold all tokens of a row.
_WHOLE = ContextShare()


@dataclass(frozen=True)
class LatentSpec:
    """What a layer of latent attention asks of a backend.

    A latent has `rank` + `rope_dim` numbers, a query `nope_dim` + `rope_dim`, an output `value_dim`. With `top_k` > 0 a
    token may attend to that many tokens at most, and the layer says to which. A `kv_dtype` of 8-bit floats is that of
    the first `rank` numbers: the others, which would lose most, are cached as `dtype`. The rest is as in
    `AttentionSpec`.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    device_type: str
    top_k: int = 0
    deterministic: bool = False
    context: ContextShare = _WHOLE

    @property
    def width(self) -> int:
        """Numbers of a latent."""
        return self.rank + self.rope_dim

    @property
    def turned_bytes(self) -> int:
        """Bytes of a cached latent behind its first `rank` numbers, where these are 8-bit floats; else 0."""
        return self.rope_dim * self.dtype.itemsize if self.kv_dtype.itemsize == 1 else 0

    @property
    def num_kv_heads(self) -> int:
        """One latent serves all heads."""
        return 1


@dataclass(frozen=True)
class LatentParams:
    """A layer's spec and `up` [num_heads, nope_dim + value_dim, rank], which makes keys and values of latents.

    A query is absorbed, so that it can be multiplied with latents, or latents are expanded to keys and values: both
    give equal scores, up to rounding.
    """

    spec: LatentSpec
    up: Tensor

    def absorb(self, query: Tensor) -> Tensor:
        """[T, H, nope + rope] → [T, H, rank + rope]: what is multiplied with latents."""
        spec, out = self.spec, query.new_empty(*query.shape[:2], self.spec.width)
        nope, out[..., spec.rank :] = query.split([spec.nope_dim, spec.rope_dim], -1)
        torch.bmm(nope.transpose(0, 1), self.up[:, : spec.nope_dim], out=out[..., : spec.rank].transpose(0, 1))
        return out

    def values_of(self, mixed: Tensor) -> Tensor:
        """[T, H, value_dim] of weighed sums of latents' first part, [T, H, rank]."""
        out = mixed.new_empty(*mixed.shape[:2], self.spec.value_dim)
        up = self.up[:, self.spec.nope_dim :].transpose(1, 2)
        torch.bmm(mixed.transpose(0, 1), up, out=out.transpose(0, 1))
        return out

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, H, nope_dim], without the part that heads share, and values [S, H, value_dim] of `latents`."""
        spec = self.spec
        joined = (latents[:, : spec.rank] @ self.up.flatten(0, 1).t()).unflatten(1, (spec.num_heads, -1))
        return joined[..., : spec.nope_dim], joined[..., spec.nope_dim :]


class LatentBackend(CacheBackend):
    """Serves `frame.layers` latent attention. It chooses, row by row, to absorb queries or to expand latents."""

    spec_type = LatentSpec
    spec: LatentSpec

    @classmethod
    def kv_format(cls, spec: LatentSpec) -> BlockFormat:
        """`forward` gets a cache of [num_blocks, block_size, rank + rope_dim].

        With 8-bit floats it gets bytes: those of the first `rank` numbers of a latent, then those of the others.
        """
        if spec.kv_dtype.itemsize == 1:
            return BlockFormat((spec.block_size, spec.rank + spec.turned_bytes), (0, 1), torch.uint8, token_axis=0)
        return BlockFormat((spec.block_size, spec.width), (0, 1), spec.kv_dtype, token_axis=0)

    @abstractmethod
    def forward(
        self, layer: LatentParams, query: Tensor, latent: Tensor, kv_cache: Tensor, plan: Any, chosen: Tensor | None
    ) -> Tensor:
        """Stores `latent` [T, rank + rope_dim] at the plan's slots, then attends with `query` [T, H, nope + rope_dim].

        Where the spec has `top_k`, a token attends to the positions of its row that int32 `chosen` [T, top_k] holds,
        each once; -1 is none. Returns [T, H, value_dim]; rows of padding tokens are unspecified but finite.
        """


@dataclass(frozen=True)
class IndexSpec:
    """What the index of sparse attention asks of a backend: `num_heads` small queries a token and one key.

    A pair scores Σ_h w_h · relu(q_h · k · `scale`); the `top_k` best are what a token attends to.
    """

    num_heads: int
    head_dim: int
    top_k: int
    scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    device_type: str
    deterministic: bool = False
    context: ContextShare = _WHOLE

    @property
    def num_kv_heads(self) -> int:
        """All heads share a key."""
        return 1


class IndexBackend(CacheBackend):
    """Serves `frame.layers` indexes of sparse attention."""

    spec_type = IndexSpec
    spec: IndexSpec

    @classmethod
    def kv_format(cls, spec: IndexSpec) -> BlockFormat:
        """`forward` gets a cache of [num_blocks, block_size, head_dim]."""
        return BlockFormat((spec.block_size, spec.head_dim), (0, 1), spec.kv_dtype, token_axis=0)

    @abstractmethod
    def forward(
        self, spec: IndexSpec, query: Tensor, weights: Tensor, key: Tensor, kv_cache: Tensor, plan: Any
    ) -> Tensor:
        """Stores `key` [T, head_dim], then scores with `query` [T, H, head_dim] and `weights` [T, H].

        Returns int32 [T, top_k]: the positions of the best tokens up to each token itself, in any order, and -1 where a
        row has fewer.
        """


#: What layers ask of backends.
CacheSpec: TypeAlias = AttentionSpec | LatentSpec | IndexSpec
