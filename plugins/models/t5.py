"""T5 (1.0 and 1.1, Flan-T5), mT5 and UMT5: RMSNorm, scores that are not scaled and have biases by distance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from frame.interfaces import Build, LazyTensor, ModelSetup
from frame.layers import WeightSlot, over_encoder

from .activations import gate_activation
from .added_positions import NoPositions
from .classic import ClassicAttention, NormedGatedMLP, SequentialLayer
from .encoder_decoder import Across, CrossLayer, EncoderDecoder, Stack
from .plain_mlp import PlainMLP

#: The kind of a layer's own attention, by whether it reads across.
_KINDS: Mapping[bool, Literal["decoder", "encoder"]] = {True: "decoder", False: "encoder"}
#: What a checkpoint may call the embedding, and the head.
_TOKENS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_HEAD = "lm_head.weight"


class DistanceBias(nn.Module):
    """For each head a learned bias for each bucket of distances, as a `table` of all distances that differ.

    Half of the buckets are single distances, the others grow by a factor up to the `reach`, behind which all are alike.
    With `both` keys behind a query have half of all buckets.
    """

    table: Tensor

    def __init__(self, build: Build, prefix: str, *, both: bool) -> None:
        super().__init__()
        config, group = build.config, build.groups.tensor
        heads = config.num_heads // group.size
        self.name, self.mine = (
            f"{prefix}.relative_attention_bias.weight",
            slice(group.rank * heads, (group.rank + 1) * heads),
        )
        count, reach = config.relative_attention_num_buckets, config.relative_attention_max_distance
        self.shape = count, config.num_heads
        self.weight = nn.Parameter(
            torch.empty(count, heads, dtype=build.dtype, device=build.device), requires_grad=False
        )
        self.buckets = _buckets(torch.arange(-reach, reach + 1), count, reach, both=both)
        table = torch.zeros(heads, 2 * reach + 1, dtype=build.dtype, device=build.device)
        self.register_buffer("table", table, persistent=False)

    def finish_load(self) -> None:
        """Spreads what was loaded over the distances."""
        self.table.copy_(self.weight[self.buckets.to(self.weight.device)].T)

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(self.name, self.shape, self.weight, (slice(0, self.shape[0]), self.mine))]


def _buckets(distances: Tensor, count: int, reach: int, *, both: bool) -> Tensor:
    """The bucket of each of `distances` int64 [n], which are a key's position less a query's."""
    first = torch.zeros_like(distances)
    if both:
        count //= 2
        first, distances = count * (distances > 0), distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    single = count // 2
    growth = torch.log(distances.float().clamp(min=1) / single) / math.log(reach / single)
    large = (single + (growth * (count - single)).long()).clamp(max=count - 1)
    return first + torch.where(distances < single, distances, large)


class T5ForConditionalGeneration(EncoderDecoder):
    """The biases of the first layer of each side are those of all its layers.

    The head has rows of its own: a checkpoint without them has those of the embedding, whatever config.json says.
    """

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^(encoder|decoder)\.embed_tokens\.", "shared."),
        (r"\.wi_0\.", ".gate_proj."),
        (r"\.wi_1\.", ".up_proj."),
        (r"\.wo\.", ".down_proj."),
    )
    ignores: ClassVar[Sequence[str]] = (r".*\.EncDecAttention\.relative_attention_bias\.weight",)
    #: whether layers have biases of their own
    own_biases: ClassVar[bool] = False

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        build, config = setup.build, setup.build.config
        self.tokens = build.embedding("shared", config.vocab_size, config.hidden_size)
        with over_encoder(build):
            self.encoder = self._stack(build, "encoder", config.num_layers)
        self.decoder = self._stack(build, "decoder", config.num_decoder_layers)
        self.head = build.head("lm_head", config.hidden_size, config.vocab_size)
        self.scale = config.hidden_size**-0.5 if self.scales_outputs else 1.0
        self._has_head = False

    @property
    def scales_outputs(self) -> bool:
        """Whether hidden states are scaled before the head."""
        return bool(self.config.scale_decoder_outputs)

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden * self.scale)
        return out

    def convert(self, tensors: Iterable[LazyTensor]) -> Iterable[LazyTensor]:
        found = list(tensors)
        self._has_head = any(tensor.name == _HEAD for tensor in found)
        heads = [] if self._has_head else [_AsHead(tensor) for tensor in found if tensor.name in _TOKENS][:1]
        return [*found, *heads]

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {name for name in super().load(self._with_head(pairs)) if name != _HEAD or self._has_head}

    def _with_head(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            self._has_head |= name == _HEAD
            yield name, tensor
            if name in _TOKENS and not self._has_head:
                yield _HEAD, tensor

    def _stack(self, build: Build, side: str, count: int) -> Stack:
        config, biases = build.config, list[DistanceBias]()
        for index in range(count if self.own_biases else 1):
            prefix = f"{side}.block.{index}.layer.0.SelfAttention"
            biases.append(DistanceBias(build, prefix, both=side == "encoder"))

        def make(index: int) -> nn.Module:
            bias = biases[index if self.own_biases else 0]
            return _layer(build, f"{side}.block.{index}.layer", bias.table, across=side == "decoder")

        norm = build.final_norm(f"{side}.final_layer_norm", config.hidden_size, eps=config.layer_norm_epsilon)
        stack = Stack(NoPositions(), nn.Identity(), build.layers(count, make), norm)
        stack.biases = nn.ModuleList(biases)
        return stack


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    """Never scales."""

    @property
    def scales_outputs(self) -> bool:
        return False


class UMT5ForConditionalGeneration(T5ForConditionalGeneration):
    """Each layer has biases of its own."""

    own_biases: ClassVar[bool] = True

    @property
    def scales_outputs(self) -> bool:
        return bool(self.config.tie_word_embeddings)


class _AsHead(LazyTensor):
    """The embedding's tensor under the name of the head's."""

    def __init__(self, tokens: LazyTensor) -> None:
        self.name, self.shape, self.dtype, self._tokens = _HEAD, tokens.shape, tokens.dtype, tokens

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        return self._tokens.read(index)


def _layer(build: Build, prefix: str, bias: Tensor, *, across: bool) -> nn.Module:
    """A layer of the encoder, or of the decoder if it reads `across`; its parts are numbered."""
    config = build.config
    size, heads, head_dim = config.hidden_size, config.num_heads, config.d_kv
    name, kind = f"{prefix}.0.SelfAttention", _KINDS[across]
    attention = ClassicAttention(
        build.attention_input(name, size, heads, heads, head_dim, names=("q", "k", "v")),
        build.attention(name, heads, heads, head_dim, scale=1.0, kind=kind, distance_bias=bias),
        build.linear(f"{name}.o", heads * head_dim, size, shard="row"),
    )
    places = (0, 1, 2) if across else (0, 1)
    norms = [build.norm(f"{prefix}.{place}.layer_norm", size, eps=config.layer_norm_epsilon) for place in places]
    mlp = _mlp(build, f"{prefix}.{places[-1]}.DenseReluDense")
    if not across:
        return SequentialLayer((norms[0], norms[1]), attention, mlp)
    reads = Across(build, f"{prefix}.1.EncDecAttention", heads, head_dim, ("q", "k", "v", "o"), scale=1.0, bias=False)
    return CrossLayer(norms, attention, reads, mlp, before=True)


def _mlp(build: Build, prefix: str) -> nn.Module:
    gated, _, function = str(build.config.feed_forward_proj).rpartition("-")
    if gated not in ("", "gated"):
        raise ValueError(
            f"no feed_forward_proj {build.config.feed_forward_proj!r}; there are: ACTIVATION, gated-ACTIVATION"
        )
    if not gated:
        return PlainMLP(build, (f"{prefix}.wi", f"{prefix}.down_proj"), build.config.d_ff, function, bias=False)
    function = "gelu_new" if function == "gelu" else function  # as the family means it
    return NormedGatedMLP(build, prefix, build.config.d_ff, gate_activation(build, function))
