"""Gemma 3n, the text part: several streams of hidden states of which each layer computes one and predicts the others.

Also a product of low rank beside the attention, gates of which only the largest count, keys that later layers share,
and an embedding for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.interfaces import Build, ForwardStep, ModelInputs, ModelSetup
from frame.layers import RotaryEmbedding, WeightSlot, normed_linear

from .activations import Activation, plain_activation
from .decoder import GatedMLP, gate_activation, head_shape
from .gemma2 import GemmaDecoder
from .gemma3 import Gemma3ForConditionalGeneration
from .shared_keys import KeepingAttention, Kept, PerLayerEmbedding, SharingAttention, shares_keys

_SMALLEST_SQUARE = 1e-5


class Gemma3nForCausalLM(GemmaDecoder):
    """RMSNorm around each part, normed heads and values, windows in turn, GeGLU, streams that predict each other."""

    # layers read what others keep, and the ids of tokens, which other pipeline stages do not have
    stage_tensors: ClassVar[Sequence[str]] = ()
    needs_ids = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, getattr(setup.build.config, "complete", setup.build.config)
        kinds, dim = config.layer_types, head_shape(config)[2]
        rotaries = {kind: RotaryEmbedding(build, dim, layer_type=kind) for kind in sorted(set(kinds))}
        super().__init__(
            setup,
            options,
            make_layer=lambda prefix, index: Gemma3nLayer(build, config, prefix, index, rotaries[kinds[index]]),
            partial=False,
        )
        self.per_layer = PerLayerEmbedding(build)
        size, others = config.hidden_size, range(config.altup_num_inputs - 1)
        self.splits, self.joins = (
            nn.ModuleList(build.linear(f"model.{name}.{index}", size, size) for index in others)
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden = inputs.embedded(self.embed)
        if inputs.ids is None or inputs.embeds is not None:
            raise ValueError("Gemma 3n needs the ids of tokens, not embeddings, for the embeddings of each layer")
        extra = self.per_layer(inputs.ids, hidden)
        streams = torch.stack([hidden, *(_as_large_as(hidden, split(hidden)) for split in self.splits)])
        kept: dict[str, Kept] = {}
        for index, layer in enumerate(self.layers):
            streams = layer(streams, extra[:, index], inputs.positions, step, kept)
        first = streams[0]
        joined = [_as_large_as(first, join(stream)) for join, stream in zip(self.joins, streams[1:], strict=True)]
        out: Tensor = self.norm(torch.stack([first, *joined]).mean(0))
        return out


class Gemma3nForConditionalGeneration(Gemma3nForCausalLM):
    """The text part of a checkpoint that sees and hears; the weights of the other parts are not loaded."""

    renames: ClassVar[Sequence[tuple[str, str]]] = Gemma3ForConditionalGeneration.renames
    ignores: ClassVar[Sequence[str]] = (
        *Gemma3nForCausalLM.ignores,
        r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
    )


def _as_large_as(model: Tensor, x: Tensor) -> Tensor:
    """x [T, hidden_size], its rows scaled to the root mean square of those of `model`."""
    wanted = model.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=_SMALLEST_SQUARE).sqrt()


class Gemma3nLayer(nn.Module):
    """Predicts all streams, computes the active one, and corrects the others by what that differs."""

    def __init__(self, build: Build, config: Any, prefix: str, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size, width, name = config.hidden_size, config.hidden_size_per_layer_input, f"{prefix}.self_attn"

        def norm(part: str) -> nn.Module:
            return build.norm(f"{prefix}.{part}", size, eps=config.rms_norm_eps)

        self.before_attention, self.after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        self.before_mlp, self.after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        kv_heads, dim = head_shape(config)[1:]
        self.attention: nn.Module
        if shares_keys(config, index):
            self.attention = SharingAttention(build, name, dim, rotary, config.layer_types[index])
        else:
            self.attention = KeepingAttention(build, name, index, rotary, heads=(kv_heads, dim), equal=False)
        gate, inner = gate_activation(build, config.hidden_activation), config.intermediate_size[index]
        if sparsity := config.activation_sparsity_pattern[index]:
            gate = SparseGate(build, gate, sparsity, inner)
        self.mlp = GatedMLP(build, f"{prefix}.mlp", inner, gate, reduce=True)
        self.left = build.linear(f"{prefix}.laurel.linear_left", size, config.laurel_rank)
        self.right = build.linear(f"{prefix}.laurel.linear_right", config.laurel_rank, size)
        self.after_laurel = norm("laurel.post_laurel_norm")
        self.altup = AltUp(build, config, f"{prefix}.altup")
        self.gate = build.linear(f"{prefix}.per_layer_input_gate", size, width)
        self.projection = build.linear(f"{prefix}.per_layer_projection", width, size)
        self.after_projection = norm("post_per_layer_input_norm")
        self.activation = plain_activation(build, config.hidden_activation)

    def forward(
        self, streams: Tensor, extra: Tensor, positions: Tensor, step: ForwardStep, kept: dict[str, Kept]
    ) -> Tensor:
        """streams [S, T, hidden_size], `extra` [T, hidden_size_per_layer_input] → streams."""
        predicted = self.altup.predict(streams)
        active = predicted[self.altup.active]
        normed = self.before_attention(active)
        beside = normed + self.after_laurel(self.right(self.left(normed)))
        out, _ = self.attention(nn.Identity(), normed, positions, step, kept)
        total = (active + self.after_attention(out) + beside) * 0.5**0.5
        gated, _, _ = normed_linear(self.before_mlp, self.mlp.gate_up, total, None)
        computed = total + self.after_mlp(self.mlp.down(self.mlp.activation(gated)))
        corrected = self.altup.correct(predicted, computed)
        own = self.activation(self.gate(self.altup.scaled(corrected[self.altup.active]))) * extra
        corrected[1:] += self.after_projection(self.projection(own))
        return corrected


class SparseGate(nn.Module):
    """f(gate) · up, where of each row of gates only what lies above a quantile is left, less that quantile.

    The quantile of `sparsity` is that of a normal distribution with the row's mean and deviation, over all ranks.
    """

    def __init__(self, build: Build, gate: Activation, sparsity: float, size: int) -> None:
        super().__init__()
        self.gate, self.size, self.group = gate, size, build.groups.tensor
        self.factor = NormalDist().inv_cdf(sparsity)

    def forward(self, halves: Tensor) -> Tensor:
        """Both halves [T, 2 · this rank's size] → [T, this rank's size]."""
        gate, up = halves.chunk(2, dim=-1)
        left = functional.relu(gate - self._quantile(gate))
        gated: Tensor = self.gate(torch.cat((left, up), dim=-1))
        return gated

    def _quantile(self, gate: Tensor) -> Tensor:
        if self.group.size == 1:
            return gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * self.factor
        wide = gate.float()
        sums = self.group.all_reduce(torch.stack((wide.sum(-1, keepdim=True), wide.square().sum(-1, keepdim=True))))
        mean, square = (sums / self.size).unbind()
        return (mean + (square - mean.square()).clamp(min=0).sqrt() * self.factor).to(gate.dtype)


class AltUp(nn.Module):
    """Alternating updates (Baykal et al. 2023): how streams follow from each other, by coefficients of each token."""

    def __init__(self, build: Build, config: Any, prefix: str) -> None:
        super().__init__()
        self.count, self.active, size = config.altup_num_inputs, config.altup_active_idx, config.hidden_size
        self.prefix, self.size, self.scales = prefix, size, config.altup_correct_scale
        self.correction = build.linear(f"{prefix}.correction_coefs", self.count, self.count)
        self.prediction = build.linear(f"{prefix}.prediction_coefs", self.count, self.count**2)
        self.router = build.linear(f"{prefix}.modality_router", size, self.count)
        self.norm = build.norm(f"{prefix}.router_norm", size, eps=config.rms_norm_eps)
        self.scale = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device), requires_grad=False)

    def _routed(self, x: Tensor) -> Tensor:
        """[T, hidden_size] → [T, streams]."""
        routed: Tensor = self.router(self.norm(x) * (1.0 / self.size))
        return torch.tanh(routed.float()).to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        """[S, T, hidden_size] → the same: each stream and a mixture of all."""
        weights = self.prediction(self._routed(streams[self.active])).unflatten(-1, (self.count, self.count))
        return torch.einsum("sth,tos->oth", streams, weights) + streams

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """predicted [S, T, hidden_size] and a share of what `computed` [T, hidden_size] differs from the active one."""
        weights = self.correction(self._routed(computed)) + 1.0
        corrected: Tensor = (computed - predicted[self.active]) * weights.t()[..., None] + predicted
        return corrected

    def scaled(self, x: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        return x * self.scale if self.scales else x

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.correct_output_scale", (self.size,), self.scale)]
