"""OPT, XGLM and BioGPT: positions from the third row of a table on, LayerNorm, a plain MLP, biases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ModelSetup

from .added_positions import LearnedPositions, SinePositions
from .classic import (
    ClassicAttention,
    ClassicDecoder,
    Outline,
    PostNormLayer,
    SequentialLayer,
    plain_heads,
)
from .plain_mlp import PlainMLP

#: The rows of the table before that of the first token.
_OFFSET = 2
#: Their LayerNorms have torch's default, whatever the configuration says.
_EPS = 1e-5


class OPTForCausalLM(ClassicDecoder):
    """Norms before each part, or behind it (350M, whose embeddings are also narrower than its layers)."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^(model\.)?decoder\.", ""),)
    divides_logits: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        if not config.layer_norm_elementwise_affine:
            raise ValueError("layer_norm_elementwise_affine must be true: norms without weights are not supported")
        before = config.do_layer_norm_before
        super().__init__(
            setup,
            options,
            outline=Outline(norm="final_layer_norm" if before and not config._remove_final_layer_norm else ""),
            make_layer=lambda prefix, _: _layer(
                build, prefix, config.ffn_dim, config.activation_function, bias=config.enable_bias, before=before
            ),
            places=LearnedPositions(build, "embed_positions", config.max_position_embeddings, offset=_OFFSET),
        )
        size, width = config.hidden_size, config.word_embed_proj_dim
        self.is_narrow = width != size
        if self.is_narrow:
            self.project_in, self.project_out = (
                build.linear("project_in", width, size),
                build.linear("project_out", size, width),
            )

    def embed(self, input_ids: Tensor) -> Tensor:
        """ids [T] → [T, hidden_size], without positions."""
        rows = super().embed(input_ids)
        return self.project_in(rows) if self.is_narrow else rows

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.project_out(hidden) if self.is_narrow else hidden)


class XGLMForCausalLM(ClassicDecoder):
    """Positions of sines, scaled embeddings."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^model\.", ""),)
    ignores: ClassVar[Sequence[str]] = (r"(model\.)?embed_positions\.weights",)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        _refuse_cross_attention(config)
        zeroed = -1 if config.pad_token_id is None else config.pad_token_id - _OFFSET
        super().__init__(
            setup,
            options,
            outline=Outline(norm="layer_norm", embedding_scale=_scale(config)),
            make_layer=lambda prefix, _: _layer(build, prefix, config.ffn_dim, config.activation_function),
            places=SinePositions(build, config.hidden_size // 2 - 1, offset=_OFFSET, zeroed=zeroed),
        )


class BioGptForCausalLM(ClassicDecoder):
    """Learned positions, scaled embeddings."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^biogpt\.", ""),)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        super().__init__(
            setup,
            options,
            outline=Outline(norm="layer_norm", head="output_projection", embedding_scale=_scale(config)),
            make_layer=lambda prefix, _: _layer(build, prefix, config.intermediate_size, config.hidden_act),
            places=LearnedPositions(build, "embed_positions", config.max_position_embeddings, offset=_OFFSET),
        )


def _scale(config: Any) -> float:
    return math.sqrt(config.hidden_size) if config.scale_embedding else 1.0


def _refuse_cross_attention(config: Any) -> None:
    if config.add_cross_attention:
        raise ValueError(f"{config.model_type} with cross-attention (add_cross_attention=true) is not supported")


def _layer(
    build: Build, prefix: str, inner: int, function: str, *, bias: bool = True, before: bool = True
) -> nn.Module:
    size, name = build.config.hidden_size, f"{prefix}.self_attn"
    heads, head_dim = plain_heads(build.config)
    attention = ClassicAttention(
        build.attention_input(name, size, heads, heads, head_dim, bias=bias),
        build.attention(name, heads, heads, head_dim, scale=head_dim**-0.5),
        build.linear(f"{name}.out_proj", size, size, bias=bias, shard="row"),
    )
    norms = (
        build.norm(f"{prefix}.self_attn_layer_norm", size, eps=_EPS, kind="layer"),
        build.norm(f"{prefix}.final_layer_norm", size, eps=_EPS, kind="layer"),
    )
    mlp = PlainMLP(build, (f"{prefix}.fc1", f"{prefix}.fc2"), inner, function, bias=bias)
    return SequentialLayer(norms, attention, mlp) if before else PostNormLayer(norms, attention, mlp)
