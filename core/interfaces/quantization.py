"""Quantised weights: who makes the weights of a layer, who multiplies by them, and what of a layer they may know.

A `Quantization` is a format. It is asked once for each layer and answers with a method, which gives the layer its
parameters, says which checkpoint tensors fill them, and computes with them; None leaves the layer as it is. Methods see
this rank's share of a layer only, and models see neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..layers.weights import WeightSlot
    from ..ops import Norm
    from .attention import AttentionSpec
    from .experts import ExpertMethod, ExpertSpec
    from .setup import QuantizationSetup

#: What stands between the two halves of a gated layer.
Gated: TypeAlias = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rows:
    """Output rows taken from the checkpoint tensor `name` (without suffix): `count` of its `total`, from `start`."""

    name: str
    total: int
    start: int
    count: int


@dataclass(frozen=True)
class LinearSpec:
    """What this rank has of a linear layer: `rows` in order, and the slice `columns` of their `in_features` columns.

    `transposed`: the checkpoint stores W as [in, out]. `exact`: small differences change what is computed next, as in a
    router; a format that quantises weights by itself leaves such a layer.
    """

    rows: tuple[Rows, ...]
    columns: slice
    in_features: int
    bias: bool = False
    transposed: bool = False
    exact: bool = False

    @property
    def out_features(self) -> int:
        """Rows of this rank's weight."""
        return sum(part.count for part in self.rows)

    @property
    def width(self) -> int:
        """Columns of this rank's weight."""
        return int(self.columns.stop - self.columns.start)

    @property
    def prefix(self) -> str:
        """The layer's name: its tensor's, or what the names of its tensors have in common."""
        names = (part.name.split(".") for part in self.rows)
        shared = takewhile(lambda same: len(set(same)) == 1, zip(*names, strict=False))
        return ".".join(word for word, *_ in shared)


@dataclass(frozen=True)
class EmbeddingSpec:
    """What this rank has of a table [vocab_size, dim]: `used` rows from `start`, padded to `num_rows`.

    `head`: it projects to the vocabulary, and is no embedding unless the two are tied.
    """

    vocab_size: int
    dim: int
    start: int
    used: int
    num_rows: int
    head: bool = False


class StoredTensor(NamedTuple):
    """What a checkpoint says of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class QuantizationSpec:
    """Where a format is to compute: on a `device` in `dtype`, divided over `num_ranks`, `deterministic` or not."""

    device: torch.device
    dtype: torch.dtype
    num_ranks: int = 1
    deterministic: bool = False


class LinearMethod(ABC):
    """The weights of a linear layer, and its product. One serves one layer, and may wrap another method.

    `layer` is the layer: it has `spec`, `ops`, `dtype` and `device`, makes parameters by `layer.empty(*shape,
    dtype=None)`, and takes them as attributes. x is [..., spec.width] of the model's dtype, what is returned
    [..., spec.out_features] of that dtype. `bias` [out_features] is the layer's own, or None.
    """

    #: whether `begin_load` takes memory that `finish_load` frees: such layers are loaded one after the other
    stages: ClassVar[bool] = False
    #: whether the products of a step may be asked for some tokens at a time
    takes_parts: bool = True

    @abstractmethod
    def create(self, layer: Any) -> list[WeightSlot]:
        """Gives `layer` its parameters, at their final sizes and addresses, and says which tensors fill them.

        Raises `ValueError` for a layer that it cannot hold, such as a share that cuts a group.
        """

    def begin_load(self, layer: Any) -> None:
        """Called before the first of the layer's tensors is read, in each loading."""

    def finish_load(self, layer: Any) -> None:
        """Called once the last of them has arrived, after `begin_load`; repacks in place. Not called in rehearsals."""

    def pack(self, layer: Any) -> None:
        """Called after each loading, also of weights that were restored as a run before had stored them.

        May put what `Ops.packed` gives in their place; `unpack` is called before they are written or stored again.
        """

    def unpack(self, layer: Any) -> None:
        """Undoes `pack`; called more than once."""

    @abstractmethod
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b."""

    def apply_into(self, layer: Any, out: Tensor, x: Tensor) -> Tensor:
        """x Wᵀ, written to `out` [T, out_features], which is returned."""
        return out.copy_(self.apply(layer, x, None))

    def apply_gated(self, layer: Any, x: Tensor, bias: Tensor | None, activation: Gated = "silu") -> Tensor:
        """activation(a) · b of the halves a, b of `apply`: [..., out_features / 2]."""
        gate = layer.ops.silu_mul if activation == "silu" else layer.ops.gelu_tanh_mul
        out: Tensor = gate(self.apply(layer, x, bias))
        return out

    def apply_normed(
        self, layer: Any, x: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(`apply` of normed, normed, total), where `Ops.add_rms_norm` of x, residual and norm gives the last two."""
        normed, total = layer.ops.add_rms_norm(x, residual, *norm)
        return self.apply(layer, normed, bias), normed, total

    def apply_normed_gated(
        self, layer: Any, x: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(`apply_gated` of normed through silu, total)."""
        normed, total = layer.ops.add_rms_norm(x, residual, *norm)
        return self.apply_gated(layer, normed, bias), total


class EmbeddingMethod(ABC):
    """The rows of a vocabulary: looked up by an embedding, multiplied by a head, or both where these are tied.

    `layer` has a `prefix` and an `EmbeddingSpec` as `spec`, and else what layers of a `LinearMethod` have. With
    `copies` it holds a tied `layer.weight` a second time, packed, where `Ops.packs` it.
    """

    stages: ClassVar[bool] = False
    copies: ClassVar[bool] = False

    @abstractmethod
    def create(self, layer: Any) -> list[WeightSlot]:
        """As `LinearMethod.create`; rows beyond `spec.used` give zeros."""

    def begin_load(self, layer: Any) -> None:
        """As `LinearMethod.begin_load`."""

    def finish_load(self, layer: Any) -> None:
        """As `LinearMethod.finish_load`."""

    def pack(self, layer: Any) -> None:
        """As `LinearMethod.pack`."""

    def unpack(self, layer: Any) -> None:
        """As `LinearMethod.unpack`."""

    @abstractmethod
    def rows(self, layer: Any, ids: Tensor) -> Tensor:
        """The rows [T, dim] with the numbers `ids` [T], counted from this rank's first."""

    @abstractmethod
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b for x [N, dim]: [N, num_rows]."""


class CacheQuantization:
    """How a checkpoint wants the KV cache of an attention layer stored, where the user does not say."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        self.kv_dtype = kv_dtype


class Quantization(ABC):
    """A format of weights. Built as `Class(setup, options)`, once for a model.

    It is chosen by `--quantization`, or by the checkpoint's own quantization_config.
    """

    #: whether it quantises the weights of a checkpoint that is not quantised, while these load
    online: ClassVar[bool] = False

    def __init__(self, setup: QuantizationSetup, options: Any = None) -> None:
        self.setup, self.options = setup, options

    @classmethod
    @abstractmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        """Whether it is this format in which a checkpoint with such a configuration is stored. Never raises."""

    def supports(self, spec: QuantizationSpec) -> str | None:
        """None, or every reason why it cannot compute there, joined by "; ". Never raises."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        """The method of a linear layer; None leaves it in the model's dtype.

        `prefix` is `spec.prefix`. Names are the checkpoint's, after the model's renames and before tensors are fused.
        """

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        """The method of the routed experts "PREFIX.0", "PREFIX.1", …; None leaves them."""

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        """The method of an embedding or a head; None leaves it."""

    def cache(self, prefix: str, spec: AttentionSpec) -> CacheQuantization | None:
        """How the cache of an attention layer is stored; None leaves it to the settings."""

    @property
    def numerics(self) -> str:
        """Names the format and how products are computed: KV blocks are shared between equal ones only."""
        return type(self).__qualname__


class Unquantized(Quantization):
    """All weights are of the model's dtype. The null object."""

    def __init__(self) -> None:
        """There is nothing to set up."""

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return not quantization_config

    @property
    def numerics(self) -> str:
        return ""
