"""What layers, heads and poolers compute: norms, gated activations, rotary embedding, products, experts.

Statistics of norms are taken in float32, as checkpoints were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..interfaces.experts import SILU, Gating

if TYPE_CHECKING:
    from ..interfaces.experts import RouterSpec

#: (weight, eps, offset) of `rms_norm`.
Norm = tuple[Tensor, float, float]
#: Added to the sum of chosen scores before a division by it: sigmoids may all be 0 (DeepSeek-V3).
SMALLEST_SUM = 1e-20


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) · (weight + offset) over the last dimension; x [..., dim], weight [dim] (Zhang & Sennrich 2019).

    With `offset` (Gemma) the product is taken in float32 and rounded once; without it, as Llama does, the normalised
    value is rounded to x's dtype first.
    """
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (value * (weight.float() + offset)).to(x.dtype)
    return weight * value.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the pre-norm residual step of a block."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / std · weight + bias over the last dimension (Ba et al. 2016)."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) · up for x [..., 2 · size] = (gate, up)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """gelu(gate) · up with the tanh approximation, for x [..., 2 · size] = (gate, up)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def gated(inner: Tensor, how: Gating) -> Tensor:
    """What `Gating` says of inner [..., 2 · size] = (gate, up), or of [..., size] without a gate: [..., size]."""
    first, up = inner.chunk(2, dim=-1) if how.gated else (inner, None)
    if how.limit:
        first = first.clamp(max=how.limit) if how.gated else first.clamp(-how.limit, how.limit)
        up = None if up is None else up.clamp(-how.limit, how.limit)
    if how.function == "silu":
        active = functional.silu(first) if how.alpha == 1 else first * (first * how.alpha).sigmoid()
    elif how.function in ("gelu", "gelu_tanh"):
        active = functional.gelu(first, approximate="tanh" if how.function == "gelu_tanh" else "none")
    else:
        active = functional.relu(first)
        active = active * active if how.function == "relu2" else active
    if up is None:
        return active
    return active * (up + how.shift if how.shift else up)


#: int64 [T]; or int64 [axes, T], one row for each axis, and the axis of each frequency, int32 [rotary_dim / 2].
Positions = Tensor | tuple[Tensor, Tensor]


def rotary(
    query: Tensor, key: Tensor, positions: Positions, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates the first `rotary_dim` features of each head.

    `query` [T, H, D], `key` [T, Hk, D], `cos_sin` [max_positions, rotary_dim]: cosines then sines, each rotary_dim / 2.
    `interleaved` pairs neighbours (2i, 2i+1) instead of halves (i, i + rotary_dim/2). With several axes (M-RoPE, Wang
    et al. 2024) pair i turns by the angle of its frequency at the token's position on its axis.
    """
    if isinstance(positions, Tensor):
        cos, sin = cos_sin[positions].chunk(2, dim=-1)
    else:
        places = positions[0][positions[1].long()].t()
        cos, sin = (part.gather(0, places) for part in cos_sin.chunk(2, dim=-1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def norm_rotary(
    query: Tensor,
    key: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    offset: float,
    positions: Positions,
    cos_sin: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rotary` of queries and keys that were normalised head by head (`rms_norm` with `weights` [D] of each)."""
    query, key = rms_norm(query, weights[0], eps, offset), rms_norm(key, weights[1], eps, offset)
    return rotary(query, key, positions, cos_sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    head, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined, rest), dim=-1) if rest.shape[-1] else joined


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x [..., in_features] and weight [out_features, in_features]."""
    return functional.linear(x, weight, bias)


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """Rows [T, dim] of `table` [rows, dim] by ids [T] of any integer type."""
    return functional.embedding(ids, table)


def linear_into(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`linear` of x [T, in_features] without a bias, written to `out` [T, out_features], which is returned."""
    return torch.mm(x, weight.t(), out=out)


def map_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for an elementwise function, or one along the last dimension, of x [..., dim]."""
    return function(x)


def route(logits: Tensor, spec: RouterSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, top_k], expert ids int32 [T, top_k]) from router logits [T, num_experts]; see `RouterSpec`.

    `bias` float32 [num_experts] is given if the router is `corrected`. Which of several equal experts is chosen is not
    defined.
    """
    if spec.score == "sparsemixer":
        return _sparsemixer(logits.float(), spec)
    scores = logits.float().sigmoid() if spec.score == "sigmoid" else logits.float().softmax(dim=-1)
    merit = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        groups = merit.unflatten(-1, (spec.num_groups, -1))
        best = groups.topk(2).values.sum(-1) if spec.group_score == "top2" else groups.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(spec.top_groups).indices, True)
        merit = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    ids = torch.topk(merit, spec.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if spec.renormalize:
        total = weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM
        weights = weights / (total.clamp(min=spec.least_sum) if spec.least_sum else total)
    return weights * spec.scale, ids.to(torch.int32)


def _sparsemixer(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    left, weights, ids = logits, list[Tensor](), list[Tensor]()
    for _ in range(spec.top_k):
        best, place = left.max(dim=-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * spec.jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, place))
        ids.append(place)
        left = left.scatter(1, place, -torch.inf)
    return torch.cat(weights, 1) * spec.scale, torch.cat(ids, 1).to(torch.int32)


def place_experts(
    ids: Tensor, slots_of: Tensor, num_replicas: Tensor, loads: Tensor, mapping: Tensor | None = None
) -> Tensor:
    """int32 [T, top_k]: the slot of each expert ids[t, k] for token t, and loads[slot] += 1 for each.

    `ids` int32 [T, top_k]; the replicas of expert e are slots_of[e, : num_replicas[e]], int32 [E, X] and [E], and token
    t takes number t modulo num_replicas[e]. An id outside [0, E) stays -1. `loads` int32 [P] counts no token whose
    entry in `mapping` int64 [T] is negative.
    """
    known = (ids >= 0) & (ids < slots_of.shape[0])
    experts = torch.where(known, ids, 0).long()
    tokens = torch.arange(ids.shape[0], device=ids.device)[:, None]
    slots = torch.where(known, slots_of[experts, tokens % num_replicas[experts]], -1)
    counted = known if mapping is None else known & (mapping >= 0)[:, None]
    loads.index_add_(0, torch.where(counted, slots, 0).long().flatten(), counted.to(loads.dtype).flatten())
    return slots


#: The biases of experts' two products, [E, 2I] ([E, I] without a gate) and [E, H]; None: none.
ExpertBiases = tuple[Tensor | None, Tensor | None]
NO_BIASES: ExpertBiases = (None, None)


class RowParts(NamedTuple):
    """The rows of a result in order, and what is called with the result and each part once that is launched."""

    rows: Sequence[slice]
    done: Callable[[Tensor, slice], None]


def fused_experts(
    hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, *, of_all: int = 0, first: int = 0,
    parts: RowParts | None = None, gating: Gating = SILU, biases: ExpertBiases = NO_BIASES,
) -> Tensor:  # fmt: skip
    """Σ_k weights[t, k] · down[e] (silu(gate[e] h) · (up[e] h)) with e = ids[t, k] - first, or another `gating`.

    `hidden` [T, H], `gate_up` [E, 2I, H], or [E, I, H] without a gate, `down` [E, H, I], `weights`, `ids` [T, top_k];
    an e outside [0, E) belongs to another rank and adds nothing. `biases` are added to the two products. `of_all` is
    how many experts the tokens chose from, if more than E: kernels expect that part of the pairs here. Returns [T, H],
    the `parts` of which may travel beside the rest.
    """
    del of_all
    out, (inner_bias, outer_bias) = torch.zeros_like(hidden), biases
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(ids == expert + first)
        if token.numel() == 0:
            continue
        inner = functional.linear(hidden[token], gate_up[expert], None if inner_bias is None else inner_bias[expert])
        value = functional.linear(
            gated(inner, gating), down[expert], None if outer_bias is None else outer_bias[expert]
        )
        out.index_add_(0, token, value * weights[token, choice].unsqueeze(-1).to(value.dtype))
    if parts is not None:
        for rows in parts.rows:
            parts.done(out, rows)
    return out


def sum_rows(hidden: Tensor, lengths: Tensor) -> Tensor:
    """float32 [B, dim]: sums over runs of lengths[i] (int64 [B], together T) rows of hidden [T, dim]."""
    return torch.segment_reduce(hidden.float(), "sum", lengths=lengths, axis=0, unsafe=True)


def unit(rows: Tensor) -> Tensor:
    """Each row of [N, dim] scaled to length 1; a row of zeros stays one."""
    return functional.normalize(rows, dim=-1)
