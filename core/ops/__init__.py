"""`Ops`: every operation on a device that layers and the runner call, each with its reference in plain torch.

A platform subclasses `Ops` and overrides the methods that it computes faster, with the same signature and meaning.
Tests compare kernels with the references, which are therefore written to be read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..interfaces.experts import SILU, Gating
from . import adapters, attention, layers, logits, quantized, sampling, states, step
from .layers import NO_BIASES, ExpertBiases, Norm, Positions, RowParts
from .quantized import CodedWeights


class Ops:
    """The reference ops. One instance serves every layer of a worker, and the runner.

    `invariant` is its only state: the runner sets it before each step, and while it is set no row of a result may
    depend, in any bit, on the other rows or on their number. The references here ignore it; a platform that
    supports deterministic requests obeys it.
    """

    def __init__(self) -> None:
        self.invariant = False

    # layers
    rms_norm = staticmethod(layers.rms_norm)
    add_rms_norm = staticmethod(layers.add_rms_norm)
    layer_norm = staticmethod(layers.layer_norm)
    silu_mul = staticmethod(layers.silu_mul)
    gelu_tanh_mul = staticmethod(layers.gelu_tanh_mul)
    norm_rotary = staticmethod(layers.norm_rotary)
    rotary = staticmethod(layers.rotary)

    def latent_rotary(
        self, query: Tensor, latent: Tensor, norm: Norm, positions: Positions, cos_sin: Tensor,
        interleaved: bool = False, scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """What latent attention reads: `latent` [T, rank + rope] with its first part normalised and the rest turned.

        `norm` has a weight [rank]; what it gives is multiplied with `scale`. The last `rope` features of `query`
        [T, H, nope + rope] are turned as by `rotary`, in place.
        """
        first, key = latent.split([len(norm[0]), latent.shape[1] - len(norm[0])], -1)
        part = query[..., query.shape[2] - key.shape[1] :]
        first = self.rms_norm(first, *norm)
        turned, key = self.rotary(part, key.unsqueeze(1), positions, cos_sin, interleaved)
        part.copy_(turned)
        return torch.cat((first if scale == 1.0 else first * scale, key.squeeze(1)), -1)

    lookup = staticmethod(layers.lookup)
    linear = staticmethod(layers.linear)
    linear_into = staticmethod(layers.linear_into)

    def packs(self, weight: Tensor) -> bool:
        """Whether `packed` gives a tensor for a weight [N, K], which need not have its values yet."""
        return False

    def packed(self, weight: Tensor) -> Tensor | None:
        """A weight [N, K] in the order that `linear` and its kin read fastest; None for one that stays as it is.

        A new tensor of the same shape, type and size, which only they and `to_dense`, which gives the weight, can read.
        """
        return None

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """silu(a) · b of the halves a, b of x Wᵀ + b: x [..., in_features], weight [2 · size, in_features]."""
        return self.silu_mul(self.linear(x, weight, bias))

    def norm_linear(
        self, x: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(normed Wᵀ + b, normed, total): (normed, total) is `add_rms_norm` of x, residual [T, in_features], norm."""
        normed, total = self.add_rms_norm(x, residual, *norm)
        return self.linear(normed, weight, bias), normed, total

    def norm_linear_silu_mul(
        self, x: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(`linear_silu_mul` of normed, total), where `add_rms_norm` of x, residual and norm gives (normed, total)."""
        normed, total = self.add_rms_norm(x, residual, *norm)
        return self.linear_silu_mul(normed, weight, bias), total

    map_rows = staticmethod(layers.map_rows)

    # quantised weights
    dequantize = staticmethod(quantized.dequantize)
    dequantize_packed = staticmethod(quantized.dequantize_packed)
    dequantize_table = staticmethod(quantized.dequantize_table)

    def scaled_linear(
        self,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        bias: Tensor | None = None,
        zeros: Tensor | None = None,
        input_scale: Tensor | None = None,
        *,
        rounds: bool = False,
    ) -> Tensor:
        """x Wᵀ + b for x [..., K] and W = `dequantize(codes, scales, block, zeros)` [N, K].

        If it `rounds`, a platform may round x to the codes' type as well: each row by its own largest value, or
        divided by `input_scale` float32 [1], as a checkpoint with static activations asks.
        """
        del input_scale, rounds
        return self.linear(x, self.dequantize(codes, scales, block, zeros, x.dtype), bias)

    def packed_linear(
        self, x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """x Wᵀ + b for x [..., K] and W = `dequantize_packed(packed, scales, zeros)` [N, K]."""
        return self.linear(x, self.dequantize_packed(packed, scales, zeros, x.dtype), bias)

    def table_linear(
        self, x: Tensor, packed: Tensor, scales: Tensor, table: Tensor, numbers: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x Wᵀ + b for x [..., K] and W = `dequantize_table(packed, scales, table, numbers)` [N, K]."""
        return self.linear(x, self.dequantize_table(packed, scales, table, numbers, x.dtype), bias)

    # attention
    write_kv = staticmethod(attention.write_kv)
    paged_attention = staticmethod(attention.paged_attention)
    merge_parts = staticmethod(attention.merge_parts)
    # experts
    route = staticmethod(layers.route)
    place_experts = staticmethod(layers.place_experts)
    fused_experts = staticmethod(layers.fused_experts)

    def coded_experts(
        self, hidden: Tensor, gate_up: CodedWeights, down: CodedWeights, weights: Tensor, ids: Tensor, *,
        of_all: int = 0, first: int = 0, parts: RowParts | None = None, gating: Gating = SILU,
        biases: ExpertBiases = NO_BIASES, rounds: bool = False,
    ) -> Tensor:  # fmt: skip
        """`fused_experts` of the weights that codes stand for; fewer choices than experts dequantise the chosen alone.

        If it `rounds`, a platform may round what the products are given to the codes' type, as in `scaled_linear`.
        """
        del rounds
        if ids.numel() < len(gate_up.codes) and not self.invariant:
            gate_up, down, biases, ids = quantized.only_chosen(gate_up, down, biases, ids, first)
            of_all = first = 0
        pair = gate_up.weight(self, hidden.dtype), down.weight(self, hidden.dtype)
        how: dict[str, Any] = {"of_all": of_all, "first": first, "parts": parts, "gating": gating, "biases": biases}
        return self.fused_experts(hidden, *pair, weights, ids, **how)

    # adapters
    group_slots = staticmethod(adapters.group_slots)
    add_adapters = staticmethod(adapters.add_adapters)
    add_joined_adapters = staticmethod(adapters.add_joined_adapters)
    adapted_experts = staticmethod(adapters.adapted_experts)
    spread_slots = staticmethod(adapters.spread_slots)
    # states
    copy_blocks = staticmethod(states.copy_blocks)
    causal_conv = staticmethod(states.causal_conv)
    ssd_scan = staticmethod(states.ssd_scan)
    selective_scan = staticmethod(states.selective_scan)
    gated_delta = staticmethod(states.gated_delta)
    # pooling
    sum_rows = staticmethod(layers.sum_rows)
    unit = staticmethod(layers.unit)
    # sampling
    greedy = staticmethod(sampling.greedy)
    join_drawn = staticmethod(sampling.join_drawn)
    draw = staticmethod(sampling.draw)
    best_of_part = staticmethod(sampling.best_of_part)
    join_parts = staticmethod(sampling.join_parts)
    keep_threshold = staticmethod(sampling.keep_threshold)
    add_bias = staticmethod(logits.add_bias)
    keep_only = staticmethod(logits.keep_only)
    apply_bitmask = staticmethod(logits.apply_bitmask)
    match_tails = staticmethod(logits.match_tails)
    penalize = staticmethod(logits.penalize)
    count_tokens = staticmethod(logits.count_tokens)
    top_logprobs = staticmethod(logits.top_logprobs)
    accept_drafts = staticmethod(sampling.accept_drafts)
    # the step
    write_rows = staticmethod(step.write_rows)
    write_values = staticmethod(step.write_values)
    build_inputs = staticmethod(step.build_inputs)
    advance = staticmethod(step.advance)


__all__ = ["CodedWeights", "Norm", "Ops"]
