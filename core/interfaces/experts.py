"""Routed experts in three parts: who chooses them, who moves tokens to the ranks that hold them, who computes them.

A router gives each token its experts and their weights (`Routing`). An `ExpertExchange` brings tokens and experts
together, and sums what comes back. An `ExpertMethod` holds the weights of this rank's experts and multiplies. None of
them knows the others' work. Experts lie in slots: rank r of those that share them holds the slots from
r * `slots_per_rank`, and without replicas slot e holds expert e.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..layers.weights import WeightSlot
    from .model import ForwardStep

#: Activations by the names that checkpoints give them, and by those of `Gating`.
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip
#: How an exchange hands tokens to experts: "tokens" is [N, H] with slots [N, k], "slots" [slots, capacity, H] with how
#: many rows of each slot are tokens.
ExpertLayout: TypeAlias = Literal["tokens", "slots"]


@dataclass(frozen=True)
class RouterSpec:
    """How a token's experts are chosen and weighed, from float32 scores of its router logits.

    `top_k` experts with the best scores are chosen; with `corrected` a learned bias is added to the scores for that
    alone. With several groups of experts, which lie side by side, a token chooses among those of its `top_groups` best
    groups only; a group is as good as its best expert ("max"), or as its two best together ("top2"). The weights are
    the scores of the chosen, divided by their sum, or by `least_sum` if that is more, if `renormalize`, times `scale`.

    A "sparsemixer" (Phi-3.5-MoE) chooses one expert after the other. The weight of each is its part of a softmax over
    the logits z not yet chosen that are near the best one, m: those with (m - z) / max(|z|, m) up to 2 · `jitter`.
    Raises `ValueError` for values that do not fit.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    corrected: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    least_sum: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.score not in ("softmax", "sigmoid", "sparsemixer"):
            raise ValueError(f"no score {self.score!r} of a router; there are: softmax, sigmoid, sparsemixer")
        if self.score == "sparsemixer" and (self.renormalize or self.corrected or self.num_groups > 1):
            raise ValueError("a sparsemixer is not renormalized, and has neither a correction nor groups of experts")
        if self.group_score not in ("max", "top2"):
            raise ValueError(f"no score {self.group_score!r} of groups of experts; there are: max, top2")
        if self.num_groups < 1 or self.num_experts < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts cannot be divided into {self.num_groups} equal groups")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"{self.top_groups} groups cannot be chosen of {self.num_groups}")
        group = self.num_experts // self.num_groups
        if not 1 <= self.top_k <= group * self.top_groups:
            raise ValueError(f"{self.top_k} experts cannot be chosen of {group * self.top_groups}")
        if self.group_score == "top2" and self.num_groups > 1 and group < 2:
            raise ValueError("a group of one expert has no two best ones: score groups by max")


@dataclass(frozen=True)
class Gating:
    """What an expert computes between its products: function(gate) · (up + `shift`), or function(up) without a gate.

    Functions: "silu", x · logistic(`alpha` · x); "gelu"; "gelu_tanh", its approximation; "relu"; "relu2", its square.
    A `limit` > 0 bounds gate from above and up on both sides before.
    """

    function: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    shift: float = 0.0
    limit: float = 0.0


#: Llama's kind.
SILU = Gating()


@dataclass(frozen=True)
class ExpertSpec:
    """The experts of a layer: down(activation(gate x) · up x), or down(activation(up x)) unless they are `gated`.

    Each token has `top_k` of them. Layers are called in the order in which a model makes them.
    With `weights_on_input` a token's weights multiply what its experts are given, not what they return.
    `alpha`, `shift` and `limit` are those of `Gating`. With `bias` each of the products has one.

    `names` are those of (gate, up, down) in the checkpoint, (up, down) without a gate: each expert's tensors are
    "PREFIX.E.NAME.weight". Or two tensors hold all experts, the first of each pair of products and the second, under
    the names `joined`, by default "gate_up_proj" and "down_proj" of such names: [E, 2 · intermediate, H], gate before
    up, and [E, H, intermediate]. They may be [E, H, 2 · intermediate] and [E, intermediate, H] too, and are where they
    are `transposed` and neither shape tells; in `interleaved` ones gate and up take turns. Their biases end in
    "_bias". Raises `ValueError` for an activation that nothing computes.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    activation: str = "silu"
    bias: bool = False
    weights_on_input: bool = False
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    alpha: float = 1.0
    shift: float = 0.0
    limit: float = 0.0
    joined: Sequence[str] = ()
    transposed: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"no activation {self.activation!r} of experts; there are: {', '.join(ACTIVATIONS)}")
        if len(self.names) != 2 + self.gated:
            raise ValueError(f"experts that are {'' if self.gated else 'not '}gated have no tensors {list(self.names)}")

    @property
    def gating(self) -> Gating:
        """What `Ops.fused_experts` computes between the products."""
        return Gating(ACTIVATIONS[self.activation], self.gated, self.alpha, self.shift, self.limit)


class Routing(NamedTuple):
    """The k experts of each token: float32 `weights` [T, k] and int32 `ids` [T, k]."""

    weights: Tensor
    ids: Tensor


@dataclass
class Activations:
    """What experts are given: `values` [T, H], and their `scales` where they are quantised."""

    values: Tensor
    scales: Tensor | None = None


@dataclass
class Dispatched(Activations):
    """Tokens at the rank that holds their experts, as the exchange's layout says, and what its `combine` needs.

    "tokens": `values` [N, H], `weights` float32 [N, k] and `slots` int32 [N, k], this rank's slots counted from 0 (from
    `layer.base` for methods that take all slots); any other number is a slot of another rank. "slots": `values` [slots,
    capacity, H] and `counts` int32 [slots]; the exchange weighs what comes back. `handle` is the exchange's own.
    """

    weights: Tensor | None = None
    slots: Tensor | None = None
    counts: Tensor | None = None
    handle: Any = None


@dataclass(frozen=True)
class ExchangeSpec:
    """What layers of experts ask of an exchange.

    `num_ranks` share the experts, each with `slots_per_rank` slots; each run of `tensor_size` of them, a data rank, has
    the same tokens, in a step at most `max_tokens` with `hidden_size` numbers of `dtype`, each for `top_k` slots.
    """

    hidden_size: int
    top_k: int
    slots_per_rank: int
    num_ranks: int
    tensor_size: int
    max_tokens: int
    dtype: torch.dtype
    device_type: str

    @property
    def num_data_ranks(self) -> int:
        """Ranks with tokens of their own."""
        return self.num_ranks // self.tensor_size


class ExpertExchange(ABC):
    """Brings the tokens of ranks to the ranks that hold their experts, and the results back.

    Built with an `ExchangeSetup`, once for each spec of a worker's layers, which take turns. Every rank of the experts'
    group calls `dispatch` and then `combine`, layer by layer, also with no token.
    """

    #: whether it reads values on the host, so that no step is captured
    needs_python: ClassVar[bool] = True
    layout: ClassVar[ExpertLayout] = "tokens"

    @classmethod
    @abstractmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        """None, or every reason why it cannot serve such layers, joined by "; ". Never raises."""

    @abstractmethod
    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        """Sends this rank's T tokens; `routing.ids` are slots of all ranks, -1 for none.

        `step.tokens_per_rank` are the tokens of each data rank; all have T without it. Raises `ValueError` where T is
        another number than is said there of this rank.
        """

    @abstractmethod
    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        """[T, H]: this rank's part, of a sum over its tensor group, of each token's sum over its k experts.

        `out` is what the experts gave: [N, H], each row summed over its local slots and weighed, or [slots, capacity,
        H]. The sum of the parts is the same for every exchange.
        """

    def close(self) -> None:
        """Frees buffers. May be called twice."""


class LocalExchange(ExpertExchange):
    """Every rank has all tokens, so nothing moves: experts of other ranks are left to them. The null object."""

    needs_python = False

    def __init__(self, first_slot: int = 0) -> None:
        self._first = first_slot

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        return "nothing moves between data ranks" if spec.num_data_ranks > 1 else None

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        del step
        slots = routing.ids - self._first if self._first else routing.ids
        return Dispatched(x.values, x.scales, routing.weights, slots)

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        del sent
        return out


#: (gate_up, down), (their biases, each None where there is none)
ExpertMatrices: TypeAlias = "tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]"


class ExpertMethod(ABC):
    """Holds the weights of a layer's experts and multiplies. `layer` is the layer of experts, which has the sizes."""

    #: what it takes from an exchange
    layouts: ClassVar[Sequence[ExpertLayout]] = ("tokens",)
    #: whether `apply` takes slots numbered over all ranks where nothing moves; this rank's first is then `layer.base`
    takes_all_slots: ClassVar[bool] = False
    #: whether `begin_load` takes memory that `finish_load` frees: such layers are loaded one after the other
    stages: ClassVar[bool] = False

    @abstractmethod
    def create(self, layer: Any) -> None:
        """Gives `layer` its parameters, made by `layer.empty`, at their final sizes.

        Raises `ValueError` for experts that it cannot compute.
        """

    @abstractmethod
    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        """Which checkpoint tensors fill them, for the experts that `layer.held` names; asked at each load."""

    @abstractmethod
    def rows(self, layer: Any) -> list[Tensor]:
        """All that belongs to the experts, contiguous, each with a row for each of this rank's slots."""

    @abstractmethod
    def apply(self, layer: Any, dispatched: Dispatched) -> Tensor:
        """What the experts give, in the shape that `ExpertExchange.combine` takes."""

    def matrices(self, layer: Any, dtype: torch.dtype) -> ExpertMatrices | None:
        """(gate_up, down) of all of this rank's slots in `dtype`, and their biases, as `Ops.fused_experts` takes them.

        Asked instead of `apply` in steps in which adapters add to both products; None where there are none such.
        """
        return None

    def prepare(self, hidden: Tensor) -> Activations:
        """What travels of `hidden` [T, H]; a method may quantise it."""
        return Activations(hidden)

    def begin_load(self, layer: Any) -> None:
        """Called before the first of the layer's tensors is read, in each loading."""

    def finish_load(self, layer: Any) -> None:
        """Called once the last of them has arrived, after `begin_load`. Not called in rehearsals."""

    def pack(self, layer: Any) -> None:
        """As `LinearMethod.pack`."""

    def unpack(self, layer: Any) -> None:
        """As `LinearMethod.unpack`."""
