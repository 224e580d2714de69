"""A model: layers put together from the parts that `build` hands out.

`build` makes linear layers, embeddings, attention and experts for the names of a checkpoint. Sharding, quantisation,
adapters and expert maps attach there, so that models know none of them. Knows no request and no scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..layers.weights import WeightMap
    from .attention import GroupBatch
    from .loader import LazyTensor
    from .setup import ModelSetup

Shard = Literal["column", "row"]
#: What `Model.logits` returns: scores of the vocabulary, scores of classes, or nothing.
ModelOutput = Literal["tokens", "classes", "hidden"]


class LayerHooks:
    """Called around the work of every layer with a cache; a connector that loads or saves layer by layer overrides it.

    The worker's thread makes both calls; what they launch on the main queue runs in order with the layer's work. It
    makes them in steps that compute several tokens of some row, as of a prompt, and never in steps of padding.
    """

    #: whether it makes them in steps of single tokens as well, in which case no step is captured
    decode_steps: ClassVar[bool] = False

    def before(self, layer: str, batch: GroupBatch) -> None:
        """Called before the layer reads its cache for the rows of `batch`."""

    def after(self, layer: str, batch: GroupBatch) -> None:
        """Called when the layer has written what it keeps of this step to its cache."""


def attend(call: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Calls the work of a layer with a cache, as `call(*tensors, step)`; the default of `ForwardStep.attend`."""
    return call(*arguments)


@dataclass(frozen=True)
class ModelInputs:
    """The T tokens of a step, those of all requests one after the other, padding included.

    `positions` int64 [Model.position_axes, T] is the place of each token in its sequence, for each axis: equal rows in
    text. Where `embeds` [T, hidden_size] is given, it replaces `ids` int32 [T], with `given` bool [T] in the rows
    that are true alone; the ids there are NO_TOKEN. `segments` int64 [T] says of which text of a pair each token is (0
    or 1); None when no row holds a pair. `stage` are the tensors that the pipeline stage before handed on, by the names
    in `Model.stage_tensors`; the first stage has none.
    `encoder_ids` int32 and `encoder_positions` int64 [E] are those of the requests that begin in this step, in a model
    some of whose layers keep what its encoder gives; E may be 0.
    """

    positions: Tensor
    ids: Tensor | None = None
    embeds: Tensor | None = None
    segments: Tensor | None = None
    stage: Mapping[str, Tensor] = field(default_factory=dict)
    given: Tensor | None = None
    encoder_ids: Tensor | None = None
    encoder_positions: Tensor | None = None

    def embedded(self, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what the first layer of this pipeline stage is given, [T, hidden_size].

        That is `stage["hidden"]` in all stages but the first one, there `embeds` where given, else `embed(ids)`: what
        is given is not scaled as `embed` may do. Raises `ValueError` without any of these.
        """
        if self.stage:
            return self.stage["hidden"]
        if self.embeds is not None and self.given is None:
            return self.embeds
        if self.ids is None:
            raise ValueError("a forward pass needs ids or embeds")
        if self.embeds is None or self.given is None:
            return embed(self.ids)
        return torch.where(self.given[:, None], self.embeds, embed(self.ids.clamp(min=0)))


@dataclass
class ForwardStep:
    """What layers need in a forward pass besides inputs: `plans[g]` is the plan of KV group g, `batches[g]` its rows.

    `tokens_per_rank` are the tokens of each data rank, padding included, where the experts are spread over data ranks.
    Layers with a cache have `attend` call their work, with their tensors and the step. A platform that captures what
    lies between two such layers as piecewise graphs puts its own function there.
    """

    plans: Sequence[Any]
    batches: Sequence[GroupBatch]
    hooks: LayerHooks = field(default_factory=LayerHooks)
    attend: Callable[..., Tensor] = attend
    tokens_per_rank: tuple[int, ...] = ()


@dataclass
class RunningStep:
    """The step that a model computes, for layers that are not given it. Set before each forward pass.

    `position_axes` is set once, by layers whose positions have more than one axis.
    """

    step: ForwardStep | None = None
    position_axes: int = 1


class Model(nn.Module, ABC):
    """A decoder or an encoder. Built as `Class(setup, options)`; its parameters then exist, on `build.device`."""

    #: (pattern, replacement) pairs, applied in order to checkpoint names; the regular expressions match anywhere
    renames: ClassVar[Sequence[tuple[str, str]]] = ()
    #: regular expressions of checkpoint names, to be matched whole, whose tensors are not loaded
    ignores: ClassVar[Sequence[str]] = ()
    #: what `logits` returns
    output: ClassVar[ModelOutput] = "tokens"
    #: the pooler of a pooling engine, where the checkpoint does not say
    default_pooler: ClassVar[str] = "last"
    #: whether every token sees the whole prompt, so that a prompt is computed in one step
    whole_prompts: ClassVar[bool] = False
    #: whether the model reads `ModelInputs.segments`
    segments: ClassVar[bool] = False
    #: whether `forward` reads values on the host, or branches by them, so that no step is captured
    needs_python: ClassVar[bool] = False
    #: whether `forward` reads the ids of tokens beside their embeddings, so that no request may bring embeddings
    needs_ids: bool = False
    #: whether `logits` treats all tokens alike behind its `Head`, so that ranks that divide the vocabulary may call it
    #: for their parts of it and draw from those. It counts in the class that defines `logits`: one that replaces it
    #: must say so again
    divides_logits: ClassVar[bool] = False
    #: names of the tensors, each [T, hidden_size] in the model's dtype, that a pipeline stage hands on to the next; a
    #: model without any cannot be divided into stages
    stage_tensors: ClassVar[Sequence[str]] = ()

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__()
        del options
        self.config = setup.build.config
        self._weights: WeightMap | None = None
        self._make_weights = setup.build.weights
        self.running = setup.build.running
        #: which rank of how many holds it, and what else decides how its weights are kept; set once it is built
        self.share: Mapping[str, Any] = {}

    @property
    def position_axes(self) -> int:
        """The rows of `ModelInputs.positions`: 3 (time, height, width) where the model has M-RoPE."""
        return self.running.position_axes

    @property
    def embed_size(self) -> int:
        """The length of the embedding of a token, as `ModelInputs.embedded` gives it."""
        return int(self.config.hidden_size)

    @classmethod
    def supports(cls, architecture: str, config: Mapping[str, Any]) -> str | None:
        """None, or why the model cannot serve config.json; asked of models called "*", which are for any architecture.

        "*" may be followed by more letters where there are several.
        """
        del architecture, config
        return None

    @abstractmethod
    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor | dict[str, Tensor]:
        """Returns the hidden states [T, hidden_size] of the tokens in `inputs`.

        Every pipeline stage but the last returns what `stage_tensors` names; a Tensor alone means "hidden".
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns [N, vocab_size] in the model's dtype, for the hidden states [N, hidden_size] of rows that need it.

        A model whose `output` is "classes" returns [N, classes]; one of "hidden" raises. If it reads values on the
        host, draws are not captured.
        """

    def convert(self, tensors: Iterable[LazyTensor]) -> Iterable[LazyTensor]:
        """Returns the tensors that weight slots name, made of those of a checkpoint, none of which is read yet."""
        return tensors

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies whole tensors, given with their checkpoint names, to the parameters; returns the names that it used.

        Called with one part of a checkpoint after the other, and then `finish_load`. Raises `ValueError` naming a
        tensor that no layer knows or whose shape differs.
        """
        if self._weights is None:
            self._weights = self._make_weights(self)
        return self._weights.load(pairs)

    def finish_load(self) -> None:
        """Called each time when the last weight has arrived; repacks weights where layers need it."""
        for module in self.modules():
            finish = getattr(module, "finish_load", None)
            if module is not self and callable(finish):
                finish()

    def unpack_weights(self) -> None:
        """Called before parameters are stored or restored as they are; then `finish_load` packs them again."""
        for module in self.modules():
            unpack = getattr(module, "unpack_weights", None)
            if module is not self and callable(unpack):
                unpack()
