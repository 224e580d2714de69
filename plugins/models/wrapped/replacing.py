"""Puts frame's parts in the place of a class's own: products, embedding, head, norms, experts and attention.

What the tensor-parallel plan of the class divides is divided; all else is whole on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, Groups, SingleGroup
from frame.layers import Attention
from frame.ops import Ops

from .fusing import GATED, GatedPart, is_gated
from .names import Names
from .parts import Calls, ExpertsPart, JoinedLinear, LinearPart, NormPart, ScaledEmbedding
from .trial import Call, Record, UnfitError

Shard = Literal["column", "row"]
#: What the plans of transformers say of a layer that is cut → how frame cuts it. Everything else stays whole.
_SHARDS: Mapping[str, Shard] = {"colwise": "column", "packed_colwise": "column", "rowwise": "row"}
#: Layers that a module may call with one tensor, and which then are one product.
_TRIPLE = ("q_proj", "k_proj", "v_proj")
_PAIR = ("gate_proj", "up_proj")
_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


class Replacing:
    """Replaces the parts of `model`, a model of transformers on the meta device of which `record` was learned."""

    def __init__(self, build: Build, model: Any, record: Record, names: Names) -> None:
        self.build, self._model, self._record, self._names = build, model, record, names
        self._plan = [(_pattern(key), shard) for key, shard in (getattr(model, "_tp_plan", None) or {}).items()]
        self._norms: dict[tuple[object, ...], float | None] = {}
        self.calls: list[Calls] = []

    def linears(self, head: str = "") -> None:
        """Replaces products alone, each by itself; `head` names one that stays."""
        for name, module in list(self._model.named_modules()):
            if type(module) is nn.Linear and name != head and module.weight.is_meta:
                self._linear(name, module, None)

    def all(self, head: str = "") -> None:
        """Replaces everything but embedding and head; `head` names an output layer that stays."""
        experts = set(self._record.experts)
        whole = set(experts)  # modules whose parts are replaced with them
        for name, module in list(self._model.named_modules()):
            if any(name.startswith(f"{one}.") for one in whole):
                continue
            if name in experts:
                self._replace_experts(name, module)
            elif is_gated(module) and self._replace_gated(name, module):
                whole.add(name)
            elif type(module) is nn.Linear and name != head and module.weight.is_meta:
                self._replace_linear(name, module)
            elif "RMSNorm" in type(module).__name__:
                self._replace_norm(name, module)
        self._add_attention()

    def embedding(self, name: str) -> nn.Module | None:
        """Replaces the input embedding; returns frame's table, None where the class's own must stay."""
        old: Any = self._model.get_submodule(name)
        if not isinstance(old, nn.Embedding):
            return None
        scale = getattr(old, "scalar_embed_scale", getattr(old, "embed_scale", None))
        plain = type(old) is nn.Embedding
        if not plain and (scale is None or set(dict(old.named_buffers())) - {"embed_scale"}):
            return None
        table = self.build.embedding(name, old.num_embeddings, old.embedding_dim)
        if plain:
            self.put(name, table)
        else:
            rounded = torch.tensor(float(scale or 1.0), dtype=self.build.dtype).item()
            self.put(name, ScaledEmbedding(table, rounded))
        return table

    def put(self, name: str, module: nn.Module) -> None:
        """Sets the part called `name`."""
        parent, _, key = name.rpartition(".")
        owner = self._model.get_submodule(parent)
        owner._modules[key] = module

    def _shard(self, name: str) -> Shard | None:
        found = next((shard for pattern, shard in self._plan if pattern.fullmatch(name)), "")
        return _SHARDS.get(found)

    def _replace_linear(self, name: str, old: nn.Linear) -> None:
        parent, _, key = name.rpartition(".")
        for group in (_TRIPLE, _PAIR):
            if key in group and self._join(parent, group):
                return
        if type(self._model.get_submodule(name)) is not nn.Linear:
            return  # joined with another
        self._linear(name, old, self._shard(name))

    def _linear(self, name: str, old: nn.Linear, shard: Shard | None) -> None:
        halves: Sequence[int] = ()
        if shard == "column" and self._is_packed(name):
            halves = (old.out_features // 2,) * 2
        self.put(name, self.build.linear(
            name, old.in_features, old.out_features, bias=old.bias is not None, shard=shard, pieces=halves
        ))  # fmt: skip

    def _is_packed(self, name: str) -> bool:
        return any(shard == "packed_colwise" for pattern, shard in self._plan if pattern.fullmatch(name))

    def _join(self, parent: str, keys: Sequence[str]) -> bool:
        """Joins the layers `keys` of the module called `parent`; False where they do not fit."""
        owner = self._model.get_submodule(parent)
        layers = [owner._modules.get(key) for key in keys]
        if not all(type(layer) is nn.Linear for layer in layers):
            return False
        first, sizes = layers[0], [layer.out_features for layer in layers]
        shards = {self._shard(f"{parent}.{key}") for key in keys}
        biases = {layer.bias is not None for layer in layers}
        inputs = {layer.in_features for layer in layers}
        if len(shards) > 1 or len(biases) > 1 or len(inputs) > 1 or shards == {"row"}:
            return False
        joined = self._joined(parent, keys, sizes, first.in_features, biases.pop(), shards.pop())
        if joined is None:
            return False
        shared = JoinedLinear(joined)
        for index, key in enumerate(keys):
            owner._modules[key] = LinearPart(shared, index, None if index else joined)
        return True

    def _joined(
        self, parent: str, keys: Sequence[str], sizes: Sequence[int], in_features: int, bias: bool, shard: Shard | None
    ) -> nn.Module | None:
        if keys is _PAIR:
            layer = self.build.linear(
                parent, in_features, sum(sizes), bias=bias, shard=shard, parts=dict(zip(keys, sizes, strict=True))
            )
            ranks = self.build.groups.tensor.size if shard else 1
            return _Split(layer, [size // ranks for size in sizes])
        call = next((call for call in self._record.calls if call.name == parent), None)
        if call is None or call.head_dim != call.value_dim:
            return None
        if sizes != [count * call.head_dim for count in (call.num_heads, call.num_kv_heads, call.num_kv_heads)]:
            return None
        with self._division(shard is not None):
            return self.build.attention_input(
                parent, in_features, call.num_heads, call.num_kv_heads, call.head_dim, bias=bias, names=keys
            )

    @contextmanager
    def _division(self, divided: bool) -> Iterator[None]:
        """Within it, parts that the build divides by itself are whole on each rank unless `divided`."""
        groups: Groups = self.build.groups
        if not divided and groups.tensor.size > 1:
            self.build.groups = replace(groups, tensor=SingleGroup())
        try:
            yield
        finally:
            self.build.groups = groups

    def _replace_norm(self, name: str, old: Any) -> None:
        if [key for key, _ in old.named_parameters()] != ["weight"] or old.weight.dim() != 1 or list(old.buffers()):
            return
        eps = next((float(getattr(old, key)) for key in _EPSILONS if isinstance(getattr(old, key, None), float)), None)
        if eps is None:
            return
        key = (type(old), len(old.weight), eps)
        if key not in self._norms:
            self._norms[key] = _offset(old, eps, self.build.dtype)
        if (offset := self._norms[key]) is not None:
            self.put(name, NormPart(self.build.norm(name, len(old.weight), eps=eps, offset=offset)))

    def _replace_gated(self, name: str, old: Any) -> bool:
        """Frame's gated layer in the place of one that gives equal bits; False where it is divided in another way."""
        gate, up, down = (getattr(old, key) for key in GATED)
        shards = tuple(self._shard(f"{name}.{key}") for key in GATED)
        biases = {gate.bias is not None, up.bias is not None}
        if shards not in ((None,) * 3, ("column", "column", "row")) or len(biases) > 1:
            return False
        if gate.out_features != up.out_features or gate.in_features != up.in_features:
            return False
        parts = dict.fromkeys(_PAIR, gate.out_features)
        gate_up = self.build.linear(
            name, gate.in_features, 2 * gate.out_features, bias=biases.pop(), shard=shards[0], parts=parts
        )
        back = self.build.linear(
            f"{name}.down_proj", down.in_features, down.out_features, bias=down.bias is not None, shard=shards[2]
        )
        self.put(name, GatedPart(gate_up, back))
        return True

    def _replace_experts(self, name: str, old: Any) -> None:
        """Frame's experts in the place of plain ones; others stay whole, computed as transformers does."""
        shapes = {key: tuple(one.shape) for key, one in old.named_parameters()}
        gate_up, down = shapes.get("gate_up_proj"), shapes.get("down_proj")
        plain = old.has_gate and old.is_concatenated and not (old.has_bias or old.is_transposed)
        normed = getattr(old, "has_post_expert_norm", False)  # older releases have neither such experts nor the name
        plain = plain and not normed and type(old)._apply_gate.__name__ == "_default_apply_gate"
        if not plain or set(shapes) != {"gate_up_proj", "down_proj"} or gate_up is None or down is None:
            return
        probe = torch.linspace(-4.0, 4.0, 33)
        if not torch.equal(old.act_fn(probe), nn.functional.silu(probe)):
            return
        spec = ExpertSpec(gate_up[0], gate_up[2], down[2], self._record.experts[name])
        self.put(name, ExpertsPart(self.build.experts(name, spec)))
        self._names.apart.add(name)

    def _add_attention(self) -> None:
        by_name: dict[str, list[Call]] = {}
        for call in self._record.calls:
            by_name.setdefault(call.name, []).append(call)
        for name, calls in by_name.items():
            if len({(call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) for call in calls}) > 1:
                raise UnfitError(f"{name} calls attention with other sizes each time")
            divided = any(self._shard(f"{name}.{key}") for key, _ in self._model.get_submodule(name).named_modules())
            with self._division(divided):
                layers = [self._attention(name, index, call) for index, call in enumerate(calls)]
            made = Calls(self.build, layers, calls[0])
            self._model.get_submodule(name).frame_attention = made
            self.calls.append(made)

    def _attention(self, name: str, index: int, call: Call) -> Attention:
        if call.sinks not in ("", "sinks"):
            raise UnfitError(f"{name} calls its sinks {call.sinks!r}")
        return self.build.attention(
            f"{name}.{index}" if index else name,
            call.num_heads,
            call.num_kv_heads,
            call.head_dim,
            scale=call.scale,
            window=call.sight.window,
            soft_cap=call.soft_cap,
            sinks=bool(call.sinks),
            kind="decoder" if call.sight.causal else "encoder_only",
        )


class _Split(nn.Module):
    """A joined product, in pieces along its outputs."""

    def __init__(self, layer: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layer, self.sizes = layer, list(sizes)

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        """[T, in_features] → one [T, size] each."""
        out: Tensor = self.layer(x)
        pieces: Sequence[Tensor] = out.split(self.sizes, dim=-1)
        return pieces


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.escape(key).replace(r"\*", r"\d+"))


def _offset(norm: Any, eps: float, dtype: torch.dtype) -> float | None:
    """The offset with which `ops.rms_norm` gives the very bits of a norm of transformers; None if none does."""
    draw = torch.Generator().manual_seed(0)
    dim = len(norm.weight)
    weight = torch.randn(dim, generator=draw).to(dtype)
    rows = (3 * torch.randn(5, dim, generator=draw)).to(dtype)
    clone = deepcopy(norm)
    clone.weight = nn.Parameter(weight, requires_grad=False)
    try:
        expected = clone(rows)
    except Exception:  # a class's own: it takes more than a tensor
        return None
    if isinstance(expected, Tensor) and expected.dtype == dtype:
        for offset in (0.0, 1.0):
            if torch.equal(Ops.rms_norm(rows, weight, eps, offset), expected):
                return offset
    return None
