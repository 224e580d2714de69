"""Dense decoders that are Llama but for traits that can be told as data: the traits, and the model made from them.

A family subclasses `DenseDecoder` and gives the `Traits` of each layer. Its checkpoint has Llama's names, or `renames`
that lead to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from frame.interfaces import Build, ModelSetup
from frame.layers import HeadsNorm, RotaryEmbedding, normed_linear

from .activations import XIELU, gate_activation, plain_activation
from .added_positions import alibi_slopes
from .decoder import Decoder, DecoderLayer, GatedMLP, RotaryAttention, SandwichLayer, head_shape
from .norms import NormSpec, Unnormed
from .positions import ScaledQueries, TurnedFirst, Unturned


@dataclass(frozen=True)
class Rope:
    """How a layer turns queries and keys. Layers with equal ones share a table.

    `layer_type` picks the settings of the checkpoint that has several; `partial` is the part of a head that is turned
    where the checkpoint says nothing, `base` replaces its rope_theta. Norms of heads come before, if `after_norms`,
    else behind. `growth` is (beta, length) of `ScaledQueries`.
    """

    layer_type: str | None = None
    interleaved: bool = False
    partial: float = 1.0
    base: float | None = None
    after_norms: bool = True
    growth: tuple[float, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What is special in a layer; the defaults are Llama's without biases.

    `inputs` are the names of the projections, one name if the checkpoint joins them; `bias` is of these alone. `clip`
    bounds what they give, `scale` of scores is 1 / √head size where it is 0, `rope` None leaves positions out, and with
    `alibi` scores fall with the distance. `head_norms` are the names of the norms of queries and keys, over each head
    or, if `over_heads`, over all together. The feed-forward part has gate and up, in one tensor if "joined", or no gate
    if "plain". `sub_norms` are the names of norms before the last product of each part.

    `before` and `after` are the names of the norms around the attention and around the feed-forward part, "" for none.
    What a part gives is multiplied by `branch_scale` before it is added.
    """

    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    bias: bool = False
    output_bias: bool = False
    clip: float = 0.0
    scale: float = 0.0
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    rope: Rope | None = Rope()
    head_norms: tuple[str, str] | None = None
    over_heads: bool = False
    activation: str = "silu"
    mlp: Literal["gated", "joined", "plain"] = "gated"
    mlp_bias: bool = False
    sub_norms: tuple[str, str] | None = None
    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] = ("", "")
    branch_scale: float = 1.0


class DenseDecoder(Decoder):
    """A `Decoder` whose layers are made from the `Traits` of each."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        traits = [self.traits(config, index) for index in range(config.num_hidden_layers)]
        parts = DenseParts(build, self.norms(config), {layer.rope for layer in traits})
        super().__init__(
            setup,
            options,
            make_layer=lambda prefix, index: parts.layer(prefix, traits[index]),
            norm=parts.norms.make_final(build, partial=parts.gives_sums(traits[-1])),
        )

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        """The traits of layer `index`. Raises `ValueError` for a value of the configuration that is not supported."""
        raise NotImplementedError

    @classmethod
    def norms(cls, config: Any) -> NormSpec:
        """The norms around the parts and behind the layers."""
        return NormSpec(config.rms_norm_eps)


class DenseParts:
    """Makes the layers of one model, which share the tables of positions that are made first, one for each rope.

    A table that a layer made would have no memory where that is a layer of another pipeline stage.
    """

    def __init__(self, build: Build, norms: NormSpec, ropes: Iterable[Rope | None]) -> None:
        self.build, self.norms = build, norms
        self._rotaries = {rope: self._make_rotary(rope) for rope in ropes}

    def gives_sums(self, traits: Traits) -> bool:
        """Whether each rank's part of a sum is handed to the next norm, which completes it."""
        return self.norms.completes_sums and not any(traits.after) and traits.branch_scale == 1.0

    def layer(self, prefix: str, traits: Traits) -> nn.Module:
        """The layer whose tensors begin with `prefix`."""
        partial = self.gives_sums(traits)
        attention, mlp = self._attention(f"{prefix}.self_attn", traits), self._mlp(f"{prefix}.mlp", traits)
        first, second = (self._before(prefix, name, partial) for name in traits.before)
        if not any(traits.after) and traits.branch_scale == 1.0:
            return DecoderLayer(first, attention, second, mlp)
        behind = [self._after(prefix, name, traits.branch_scale) for name in traits.after]
        return SandwichLayer((first, behind[0]), attention, (second, behind[1]), mlp)

    def _before(self, prefix: str, name: str, partial: bool) -> nn.Module:
        return self.norms.make(self.build, f"{prefix}.{name}", partial=partial) if name else Unnormed()

    def _after(self, prefix: str, name: str, scale: float) -> nn.Module:
        norms = [self.norms.make(self.build, f"{prefix}.{name}")] if name else []
        return nn.Sequential(*norms, *([Scaled(scale)] if scale != 1.0 else []))

    def _attention(self, name: str, traits: Traits) -> nn.Module:
        build, config = self.build, self.build.config
        heads, kv_heads, dim = head_shape(config)
        inputs = build.attention_input(
            name, config.hidden_size, heads, kv_heads, dim, bias=traits.bias, names=traits.inputs
        )
        output = build.linear(
            f"{name}.o_proj",
            heads * dim,
            config.hidden_size,
            bias=traits.output_bias,
            shard="row",
            reduce=not self.gives_sums(traits),
        )
        if traits.sub_norms is not None:
            norm = HeadsNorm(build, f"{name}.{traits.sub_norms[0]}", heads, dim, eps=self.norms.eps)
            output = NormedOutput(norm, output, dim)
        attention = build.attention(
            name,
            heads,
            kv_heads,
            dim,
            scale=traits.scale or dim**-0.5,
            window=traits.window,
            soft_cap=traits.soft_cap,
            sinks=traits.sinks,
            alibi_slopes=alibi_slopes(heads) if traits.alibi else None,
        )
        rotary = self._rotaries[traits.rope]
        inputs = ClippedInput(inputs, traits.clip) if traits.clip else inputs
        return RotaryAttention(inputs, rotary, attention, output, norms=self._head_norms(name, traits))

    def _head_norms(self, name: str, traits: Traits) -> tuple[nn.Module, nn.Module] | None:
        if traits.head_norms is None:
            return None
        build, eps = self.build, self.norms.eps
        heads, kv_heads, dim = head_shape(build.config)
        names = [f"{name}.{part}" for part in traits.head_norms]
        if traits.over_heads:
            return HeadsNorm(build, names[0], heads, dim, eps=eps), HeadsNorm(build, names[1], kv_heads, dim, eps=eps)
        query, key = (self.norms.make_alone(build, part, dim) for part in names)
        return query, key

    def _make_rotary(self, rope: Rope | None) -> nn.Module:
        if rope is None:
            return Unturned()
        dim, kind = head_shape(self.build.config)[2], rope.layer_type
        rotary: nn.Module = RotaryEmbedding(
            self.build, dim, layer_type=kind, interleaved=rope.interleaved, partial=rope.partial, base=rope.base
        )
        if not rope.after_norms:
            rotary = TurnedFirst(rotary)
        return rotary if rope.growth is None else ScaledQueries(self.build, rotary, *rope.growth)

    def _mlp(self, name: str, traits: Traits) -> nn.Module:
        build, size, reduce = self.build, self.build.config.intermediate_size, not self.gives_sums(traits)
        if traits.mlp == "plain":
            return PlainMLP(build, name, traits, reduce=reduce)
        mlp = GatedMLP(
            build,
            name,
            size,
            gate_activation(build, traits.activation),
            bias=traits.mlp_bias,
            reduce=reduce,
            joined="gate_up_proj" if traits.mlp == "joined" else "",
        )
        if traits.sub_norms is not None:
            norm = HeadsNorm(build, f"{name}.{traits.sub_norms[1]}", size, 1, eps=self.norms.eps)
            mlp.down = NormedOutput(norm, mlp.down, 1)
        return mlp


class PlainMLP(nn.Module):
    """A norm, then down(activation(up(x))); the result is a rank's part of a sum unless it is to `reduce`."""

    def __init__(self, build: Build, prefix: str, traits: Traits, *, reduce: bool) -> None:
        super().__init__()
        hidden_size, size, bias = build.config.hidden_size, build.config.intermediate_size, traits.mlp_bias
        self.up = build.linear(f"{prefix}.up_proj", hidden_size, size, bias=bias, shard="column")
        self.down = build.linear(f"{prefix}.down_proj", size, hidden_size, bias=bias, shard="row", reduce=reduce)
        learned = traits.activation == "xielu"
        self.activation = XIELU(build, f"{prefix}.act_fn") if learned else plain_activation(build, traits.activation)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        inner, _, residual = normed_linear(norm, self.up, hidden, residual)
        return self.down(self.activation(inner)), residual


class ClippedInput(nn.Module):
    """Query, key and value, no number of which is further from 0 than `bound`."""

    def __init__(self, inputs: nn.Module, bound: float) -> None:
        super().__init__()
        self.inputs, self.bound = inputs, bound

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden_size] → query [T, H, D], key and value [T, Hk, D]."""
        query, key, value = (part.clamp_(-self.bound, self.bound) for part in self.inputs(x))
        return query, key, value


class NormedOutput(nn.Module):
    """linear(norm(x)), where the norm is over the features of all ranks, in heads of `dim`."""

    def __init__(self, norm: HeadsNorm, linear: nn.Module, dim: int) -> None:
        super().__init__()
        self.norm, self.linear, self.dim = norm, linear, dim

    def forward(self, x: Tensor) -> Tensor:
        """[T, this rank's features] → [T, hidden_size]."""
        out: Tensor = self.linear(self.norm(x.unflatten(1, (-1, self.dim))).flatten(1))
        return out


class Scaled(nn.Module):
    """x · factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        return x * self.factor
