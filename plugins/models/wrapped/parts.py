"""What stands in a class of transformers for its own layers: frame's parts, called as the class calls its own.

Tensors of transformers have a batch of one before the tokens, [1, T, …].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from frame.interfaces import Build, Routing
from frame.layers import Attention

from .trial import Call, check_keywords


class Calls(nn.Module):
    """The attention that a module calls, once or several times in a forward pass, each time with a cache of its own."""

    def __init__(self, build: Build, layers: Sequence[Attention], call: Call) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.running, self.value_dim, self.padding = build.running, call.value_dim, call.head_dim - call.value_dim
        self.shape = (layers[0].spec.num_heads, layers[0].spec.num_kv_heads, call.head_dim)
        self.next = 0

    def begin(self) -> None:
        """Called before each forward pass."""
        self.next = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [1, H, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv] → [1, T, H, Dv]; H, Hk are this rank's."""
        step, layer = self.running.step, self.layers[self.next]
        self.next = (self.next + 1) % len(self.layers)
        if self.padding:
            value = pad(value, (0, self.padding))
        tokens = [_by_token(part) for part in (query, key, value)]
        heads, kv_heads, head_dim = self.shape
        if tokens[0].shape[1:] != (heads, head_dim) or tokens[1].shape[1:] != (kv_heads, head_dim):
            raise ValueError(
                f"{layer.name} attends with {list(tokens[0].shape[1:])} queries and {list(tokens[1].shape[1:])} keys a "
                f"token, not with {[heads, head_dim]} and {[kv_heads, head_dim]}: its class cannot be divided like that"
            )
        if query.is_meta:  # of a model without memory, which is tried for its shapes
            return value.new_empty(1, len(tokens[0]), heads, self.value_dim)
        if step is None:
            raise RuntimeError("attention was called outside of a step")
        out = layer(*tokens, step).view(1, len(tokens[0]), heads, head_dim)
        heads_out: Tensor = out[..., : self.value_dim] if self.padding else out
        return heads_out


def _by_token(heads: Tensor) -> Tensor:
    """[1, H, T, D] → [T, H, D], in which the heads of a token lie one after the other."""
    tokens = heads[0].transpose(0, 1)
    good = tokens.stride(2) == 1 and tokens.stride(1) == tokens.shape[2]
    return tokens if good else tokens.contiguous()


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **more: Any
) -> tuple[Tensor, None]:
    """Registered with transformers: attention of a class that runs here; scale, window and so on were learned."""
    del scaling
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} makes an attention mask of its own")
    check_keywords(type(module).__name__, more)
    calls: Calls = module.frame_attention  # type: ignore[assignment]
    return calls.attend(query, key, value), None


class JoinedLinear:
    """Layers that are given the same tensor, computed in one product when the first of them is called."""

    def __init__(self, layer: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self.layer = layer
        self._given: Tensor | None = None
        self._results: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        """Result number `index` for x [1, T, in_features], [1, T, its outputs]."""
        if self._given is not x or self._results[index] is None:
            self._given = x
            self._results = [result.flatten(1)[None] for result in self.layer(x.flatten(0, -2))]
        result = self._results[index]
        self._results[index] = None
        if all(one is None for one in self._results):
            self._given = None
        if result is None:
            raise RuntimeError("a joined layer gave no result")
        return result


class LinearPart(nn.Module):
    """One of the layers of a `JoinedLinear`; the first one, which is given it as a module, has the weights."""

    def __init__(self, joined: JoinedLinear, index: int, layer: nn.Module | None = None) -> None:
        super().__init__()
        self._joined, self._index, self.layer = joined, index, layer

    def forward(self, x: Tensor) -> Tensor:
        return self._joined.part(self._index, x)


class ScaledEmbedding(nn.Module):
    """An embedding whose rows are multiplied by a number that their type can hold."""

    def __init__(self, table: nn.Module, scale: float) -> None:
        super().__init__()
        self.table, self.scale = table, scale

    def forward(self, ids: Tensor) -> Tensor:
        """[...] → [..., dim]."""
        rows: Tensor = self.table(ids)
        return rows * self.scale


class HeadPart(nn.Module):
    """The output projection; classes look at the type of its weight."""

    def __init__(self, head: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = head
        self.weight = torch.empty(0, dtype=dtype)  # no parameter: it has no place on a device

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] → [..., vocab_size]."""
        logits: Tensor = self.head(hidden.flatten(0, -2))
        return logits.view(*hidden.shape[:-1], -1)


class NormPart(nn.Module):
    """An RMSNorm of frame in the place of one that gives equal bits."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → [..., dim]."""
        if x.dim() > 2 and len(x) == 1:  # [1, T, dim] or [1, T, heads, dim]: kernels know tokens and heads
            only: Tensor = self.norm(x[0])
            return only[None]
        out: Tensor = self.norm(x.reshape(-1, x.shape[-1]))
        return out.view(x.shape)


class ExpertsPart(nn.Module):
    """Routed experts of frame, given which a token has and with what weights."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """hidden [..., H], ids and weights [T, k] → [..., H]."""
        if hidden.is_meta:
            return torch.empty_like(hidden)
        routing = Routing(weights.float().flatten(0, -2), ids.to(torch.int32).flatten(0, -2))
        out: Tensor = self.experts(hidden.flatten(0, -2), routing)
        return out.view(hidden.shape)


class GivenStates(tuple[Tensor, ...]):
    """The output of a base model: hidden states, what its pooler makes of them, and nothing else."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "last_hidden_state":
            return self[0]
        return self[1] if name == "pooler_output" and len(self) > 1 else None


class GivenBase(nn.Module):
    """Stands for the base model in a class with a head, so that the head can be called with states that are there."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = real
        self._states: Tensor | None = None
        self._is_asked = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("real"), name)

    def during(self, states: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
        """The logits that `call` gives, where the base model gives `states` [B, T, hidden_size]."""
        self._states, self._is_asked = states, False
        try:
            out = call(states)
        finally:
            self._states = None
        if not self._is_asked:
            raise RuntimeError(f"the head did not ask {type(self.real).__name__} for its states")
        found: Tensor = out.logits
        return found

    def forward(self, *arguments: Any, **more: Any) -> Any:
        if self._states is None:
            return self.real(*arguments, **more)
        self._is_asked = True
        pooler = getattr(self.real, "pooler", None)
        pooled = () if pooler is None else (pooler(self._states),)
        return GivenStates((self._states, *pooled))
