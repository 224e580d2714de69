"""A model: layers put together from the parts that `build` hands out.

`build` decides how a linear layer, an embedding, attention or experts are made for a checkpoint prefix; that is where
sharding, quantisation, adapters and expert maps attach, so a model knows none of them. Knows no request and no
scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..layers.attention import Attention
    from ..ops import Ops
    from ..parallel.group import ProcessGroup
    from .attention import AttentionKind, GroupBatch
    from .setup import ModelSetup

Shard = Literal["column", "row"]
#: What `Model.logits` gives: scores of the vocabulary, scores of classes, or nothing.
ModelOutput = Literal["tokens", "classes", "hidden"]


class LayerHooks:
    """Called around the work of every layer with a cache; a connector that loads or saves layer by layer overrides it.

    Both calls come from the worker's thread; what they launch on the main queue runs in order with the layer's work.
    They come in steps that compute several tokens of a row, as of a prompt, and never in steps of padding. With
    `decode_steps` they come in steps of single tokens, too, and then no step is recorded.
    """

    decode_steps: ClassVar[bool] = False

    def before(self, layer: str, batch: GroupBatch) -> None:
        """The layer's cache is about to be read, for the rows of `batch`."""

    def after(self, layer: str, batch: GroupBatch) -> None:
        """What the layer keeps of this step is in its cache."""


def attend(call: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Calls the work of a layer with a cache: `call(*tensors, step)`."""
    return call(*arguments)


@dataclass(frozen=True)
class ModelInputs:
    """What the tokens of a step are: T of them, those of many requests in one row, padding included.

    `positions` int64 [1, T]: the place of each token in its sequence (models whose tokens have more coordinates get
    more rows). `ids` int32 [T]; `embeds` [T, hidden_size] take the place of ids where given. `segments` int64 [T] says
    which text of a pair each token is of (0 or 1); None when no row holds a pair.
    """

    positions: Tensor
    ids: Tensor | None = None
    embeds: Tensor | None = None
    segments: Tensor | None = None

    def embedded(self, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """[T, hidden_size]: `embeds` where given, else `embed(ids)`; raises `ValueError` when there is neither."""
        if self.embeds is not None:
            return self.embeds
        if self.ids is None:
            raise ValueError("a forward pass needs ids or embeds")
        return embed(self.ids)


@dataclass
class ForwardStep:
    """What a forward pass needs beside its inputs: `plans[g]` is the plan of KV group g, `batches[g]` its rows.

    `attend` calls the work of each layer with a cache, with its tensors and the step. A platform that captures what
    lies between two such layers as CUDA graphs puts its own function here.
    """

    plans: Sequence[Any]
    batches: Sequence[GroupBatch]
    hooks: LayerHooks = field(default_factory=LayerHooks)
    attend: Callable[..., Tensor] = attend


@dataclass(frozen=True)
class Groups:
    """The process groups that layers shard over."""

    tensor: ProcessGroup
    pipeline: ProcessGroup
    expert: ProcessGroup

    @classmethod
    def single(cls) -> Groups:
        """Those of a worker that is alone: nothing is divided."""
        from ..parallel.group import SingleGroup

        alone = SingleGroup()
        return cls(alone, alone, alone)


class Weights(Protocol):
    """Where the tensors of a checkpoint go in a model."""

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As `Model.load`."""


class Build(ABC):
    """Makes the parts of a model. `prefix` is always the name in the checkpoint ("model.layers.0.mlp.gate_proj").

    A part that fuses several checkpoint tensors names them in `parts` (name → output size), relative to `prefix`.
    """

    #: the Hugging Face configuration object of the (text) model
    config: Any
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    groups: Groups
    #: tokens of the longest sequence that will be served; the length of position tables
    max_model_len: int

    @abstractmethod
    def weights(self, model: Model) -> Weights:
        """Where tensors go in `model`, whose layers are all there; asked once, with the first tensors."""

    @abstractmethod
    def layers(self, count: int, make: Callable[[int], nn.Module]) -> nn.ModuleList:
        """`make(i)` for the layers of this pipeline stage; other stages' layers are pass-through."""

    @abstractmethod
    def linear(
        self,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        shard: Shard | None = None,
        parts: Mapping[str, int] | None = None,
        transposed: bool = False,
    ) -> nn.Module:
        """y = x Wᵀ + b. "column" shards outputs, "row" shards inputs and sums over the tensor group.

        `transposed`: the checkpoint stores W as [in, out].
        """

    @abstractmethod
    def attention_input(
        self,
        prefix: str,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        transposed: bool = False,
    ) -> nn.Module:
        """The fused query, key and value projection, sharded by heads; it returns (q, k, v), each [T, heads, head_dim].

        One entry in `names` means that the checkpoint holds one fused tensor in the order q, k, v.
        """

    @abstractmethod
    def attention(
        self,
        prefix: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: bool = False,
        alibi_slopes: Tensor | None = None,
        kind: AttentionKind = "decoder",
    ) -> Attention:
        """Attention over this rank's heads (`num_heads`, `num_kv_heads` are those of the whole model).

        "decoder" is causal and paged; "encoder_only" sees every token of its own row and keeps nothing, for models
        that set `whole_prompts`.
        """

    @abstractmethod
    def embedding(self, prefix: str, num_embeddings: int, dim: int, *, shard: bool = True) -> nn.Module:
        """Token (or position) embedding: ids [T] → [T, dim]; sharded over the vocabulary."""

    @abstractmethod
    def head(
        self, prefix: str, hidden_size: int, vocab_size: int, *, tied: nn.Module | None = None, bias: bool = False
    ) -> nn.Module:
        """Output projection: hidden [N, hidden_size] → logits [N, vocab_size]; `tied` shares an embedding."""

    @abstractmethod
    def norm(
        self, prefix: str, dim: int, *, eps: float, kind: Literal["rms", "layer"] = "rms", offset: float = 0.0
    ) -> nn.Module:
        """RMSNorm (weight + `offset`) or LayerNorm. Called with a residual, an RMSNorm returns (normed, residual)."""

    @abstractmethod
    def experts(
        self,
        prefix: str,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        renormalize: bool = True,
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> nn.Module:
        """Routed experts: (hidden [T, hidden_size], router logits [T, num_experts]) → [T, hidden_size]."""


class Model(nn.Module, ABC):
    """A decoder or an encoder. Built as `Class(setup, options)`; then its parameters exist, on `build.device`.

    `renames` are (pattern, replacement) pairs applied in order to checkpoint names; `ignores` are patterns of
    checkpoint tensors that are not loaded. Both are regular expressions that must match the whole name (`renames`
    match anywhere). `output` says what `logits` gives, `default_pooler` how a sequence is pooled where the checkpoint
    does not say. With `whole_prompts` every token sees the whole prompt, which is therefore computed in one step;
    `segments` says that the model reads `ModelInputs.segments`. One whose `forward` reads values on the host, or
    branches by them, says `needs_python`: then none of its steps is recorded. (`logits` may: then no draw is.)
    """

    renames: ClassVar[Sequence[tuple[str, str]]] = ()
    ignores: ClassVar[Sequence[str]] = ()
    output: ClassVar[ModelOutput] = "tokens"
    default_pooler: ClassVar[str] = "last"
    whole_prompts: ClassVar[bool] = False
    segments: ClassVar[bool] = False
    needs_python: ClassVar[bool] = False

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__()
        del options
        self.config = setup.build.config
        self._weights: Weights | None = None
        self._make_weights = setup.build.weights

    @abstractmethod
    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        """Hidden states [T, hidden_size] of the tokens in `inputs`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, vocab_size] in the model's dtype for hidden states [N, hidden_size] of the rows that need them.

        [N, classes] for a model whose `output` is "classes"; one of "hidden" raises.
        """

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies whole tensors, under their checkpoint names, into the parameters; returns the names taken.

        May be called with any part of a checkpoint, again and again; `finish_load` ends the series. Raises `ValueError`
        naming a tensor that no layer knows or whose shape differs.
        """
        if self._weights is None:
            self._weights = self._make_weights(self)
        return self._weights.load(pairs)

    def finish_load(self) -> None:
        """Called after the last weight has arrived, each time weights were (re)loaded; repacks where needed."""
        for module in self.modules():
            finish = getattr(module, "finish_load", None)
            if module is not self and callable(finish):
                finish()
