"""Mamba-2: every layer is a norm and a state-space mixer; there is no attention and no feed-forward part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import ForwardStep, Model, ModelInputs, ModelSetup
from frame.layers import Mamba2Mixer, Mamba2Spec, step_range


class MixerLayer(nn.Module):
    """A norm and the one part behind it, the sum carried as a residual that the next norm adds."""

    def __init__(self, norm: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden_size] is what the layer before added to `residual` (None before the first layer)."""
        out: tuple[Tensor, Tensor] = self.mixer(self.norm, hidden, residual, positions, step)
        return out


class Backbone(Model):
    """Embedding, layers, norm and head under the names "backbone.embeddings", "backbone.layers.0" ….

    `make_mixer(prefix, index)` makes what follows the norm of a layer. `residual_in_fp32` of the configuration is not
    obeyed: sums between layers are of the model's type, as everywhere.
    """

    #: a checkpoint of the model without its head has no "backbone." in its names
    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^(?=(embeddings?|layers|norm_f)\.)", "backbone."),
        (r"^backbone\.embedding\.", "backbone.embeddings."),
    )
    stage_tensors: ClassVar[Sequence[str]] = ("hidden",)
    divides_logits: ClassVar[bool] = True

    def __init__(
        self, setup: ModelSetup, options: Any = None, *, eps: float, make_mixer: Callable[[str, int], nn.Module]
    ) -> None:
        build = setup.build
        super().__init__(setup, options)
        config = build.config
        hidden_size = config.hidden_size

        def layer(index: int) -> nn.Module:
            prefix = f"backbone.layers.{index}"
            norm = build.norm(f"{prefix}.norm", hidden_size, eps=eps, partial=True)
            return MixerLayer(norm, make_mixer(f"{prefix}.mixer", index))

        self.embedding = build.embedding("backbone.embeddings", config.vocab_size, hidden_size)
        self.layers = build.layers(config.num_hidden_layers, layer)
        self.norm = build.final_norm("backbone.norm_f", hidden_size, eps=eps, partial=True)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = build.head("lm_head", hidden_size, config.vocab_size, tied=tied)

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden, residual = inputs.embedded(self.embedding), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, inputs.positions, step)
        out: Tensor = self.norm(hidden, residual)[0]
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out


class Mamba2ForCausalLM(Backbone):
    """RMSNorm and Mamba-2 mixers."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        spec = _spec(build.config)
        super().__init__(
            setup, options, eps=spec.eps, make_mixer=lambda prefix, index: Mamba2Mixer(build, prefix, spec)
        )


def _spec(config: Any) -> Mamba2Spec:
    if config.hidden_act != "silu":
        raise ValueError(f"Mamba-2's convolution is followed by 'silu', not by {config.hidden_act!r}")
    return Mamba2Spec(
        config.hidden_size,
        config.num_heads,
        config.head_dim,
        config.state_size,
        config.n_groups,
        config.conv_kernel,
        config.layer_norm_epsilon,
        step_range(config.time_step_limit),
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
    )
