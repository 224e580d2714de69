"""Routed experts: choosing them per token, and their gated feed-forward product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .linear import linear_invariant
from .rows import each_row


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, top_k], expert ids int32 [T, top_k]) from router logits [T, num_experts]; softmax first."""
    weights, ids = torch.topk(logits.float().softmax(dim=-1), top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids.to(torch.int32)


def fused_experts(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Σ_k weights[t, k] · down[e] (silu(gate[e] h) · (up[e] h)) with e = ids[t, k].

    `hidden` [T, H], `gate_up` [E, 2I, H], `down` [E, H, I], `weights`, `ids` [T, top_k]; an id outside [0, E) belongs
    to another rank and adds nothing. Returns [T, H].
    """
    out = torch.zeros_like(hidden)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(ids == expert)
        if token.numel() == 0:
            continue
        gate, up = functional.linear(hidden[token], gate_up[expert]).chunk(2, dim=-1)
        value = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, token, value * weights[token, choice].unsqueeze(-1).to(value.dtype))
    return out


def fused_experts_invariant(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """`fused_experts`, a token's bits being the same whatever tokens stand beside it; experts add in order of id."""
    out = torch.zeros_like(hidden)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(ids == expert)
        if token.numel() == 0:
            continue
        gate, up = linear_invariant(hidden[token], gate_up[expert]).chunk(2, dim=-1)
        value = linear_invariant(each_row(functional.silu, gate) * up, down[expert])
        out.index_add_(0, token, value * weights[token, choice].unsqueeze(-1).to(value.dtype))
    return out
