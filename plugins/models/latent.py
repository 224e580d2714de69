"""Multi-head latent attention around the cached layer: projections, norms of both latents, turned parts, output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep
from frame.layers import RMSNorm, RotaryEmbedding, normed_linear

#: The norms of latents have this, whatever `rms_norm_eps` says.
LATENT_EPS = 1e-6
#: (what the layer's attention reads, the query's latent or None, positions, step) → the tokens that each attends to
Choose = Callable[[Tensor, Tensor | None, Tensor, ForwardStep], Tensor]


class LatentAttentionBlock(nn.Module):
    """A norm, queries (through a latent of their own where there is `q_lora_rank`), latents, attention, output.

    `scales` multiply queries and latents. With `top_k` a token attends to that many others, those that `choose` gives.
    `temperature` gives for positions [1, T] what queries are multiplied with, [T].
    """

    def __init__(
        self,
        build: Build,
        prefix: str,
        rotary: RotaryEmbedding,
        *,
        bias: bool = False,
        scales: tuple[float, float] = (1.0, 1.0),
        top_k: int = 0,
        choose: Choose | None = None,
        temperature: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.choose, self.temperature = choose, temperature
        config, hidden_size, heads = build.config, build.config.hidden_size, build.config.num_attention_heads
        self.nope, self.rope, self.rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        value_dim, width = config.v_head_dim, self.nope + self.rope
        self.query_rank, self.scales, self.rotary = config.q_lora_rank or 0, scales, rotary
        parts = {"q_a_proj": self.query_rank} if self.query_rank else {}
        parts["kv_a_proj_with_mqa"] = self.rank + self.rope
        self.inputs = build.linear(prefix, hidden_size, sum(parts.values()), bias=bias, parts=parts)
        if self.query_rank:
            self.query_norm = build.norm(f"{prefix}.q_a_layernorm", self.query_rank, eps=LATENT_EPS)
            self.query = build.linear(f"{prefix}.q_b_proj", self.query_rank, heads * width, shard="column")
        else:
            self.query = build.linear(f"{prefix}.q_proj", hidden_size, heads * width, shard="column")
        self.latent_norm = RMSNorm(build, f"{prefix}.kv_a_layernorm", self.rank, LATENT_EPS)
        self.attention = build.latent_attention(
            prefix,
            heads,
            rank=self.rank,
            nope_dim=self.nope,
            rope_dim=self.rope,
            value_dim=value_dim,
            scale=width**-0.5 * stretched_scale(config),
            top_k=top_k,
        )
        self.output = build.linear(
            f"{prefix}.o_proj", heads * value_dim, hidden_size, bias=bias, shard="row", reduce=False
        )

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        joined, normed, residual = normed_linear(norm, self.inputs, hidden, residual)
        of_query, latent = joined.split([self.query_rank, self.rank + self.rope], -1)
        small = self.query_norm(of_query) if self.query_rank else None
        query = self.query(normed if small is None else small).unflatten(-1, (-1, self.nope + self.rope))
        if self.scales[0] != 1.0:
            query = query * self.scales[0]
        if self.temperature is not None:
            query = query * self.temperature(positions)[:, None, None].to(query.dtype)
        latent = self.rotary.latents(positions, query, latent, self.latent_norm, self.scales[1])
        chosen = None if self.choose is None else self.choose(normed, small, positions, step)
        return self.output(self.attention(query, latent, step, chosen)), residual


def latent_rotary(build: Build, *, interleaved: bool) -> RotaryEmbedding:
    """The positions of the turned part of queries and keys."""
    config, dim = build.config, build.config.qk_rope_head_dim
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:  # of a whole head
        dim += config.qk_nope_head_dim
    return RotaryEmbedding(build, dim, interleaved=interleaved)


def stretched_scale(config: Any) -> float:
    """What positions that yarn stretches multiply scores with: m² for m = 0.1 · mscale_all_dim · ln(factor) + 1.

    1 where `mscale_all_dim` is not given or 0.
    """
    parameters = config.rope_parameters
    all_dim, factor = parameters.get("mscale_all_dim") or 0.0, parameters.get("factor") or 1.0
    plain = parameters.get("rope_type", parameters.get("type", "default")) == "default"
    if plain or not all_dim or factor <= 1:
        return 1.0
    scale: float = (0.1 * all_dim * math.log(factor) + 1.0) ** 2
    return scale


def ignored_layers(config: Any) -> str:
    """The pattern of tensors of the layers behind the last one, which predict further tokens."""
    return rf"model\.layers\.(?!({'|'.join(map(str, range(config.num_hidden_layers)))})\.)\d+\..*"
