"""Loads the weights of a class of transformers: its conversion rules, over frame's loaders and slots.

A rule renames a tensor, or makes tensors of several ones; what it makes is read only when a slot asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import LazyTensor

_STACK = ("MergeModulelist",)
_STACK_AND_JOIN = ("MergeModulelist", "Concatenate")
#: What frame's experts call the tensors of one of them.
_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"


class _Renamed(LazyTensor):
    def __init__(self, tensor: LazyTensor, name: str) -> None:
        self._tensor, self.name, self.shape, self.dtype = tensor, name, tensor.shape, tensor.dtype

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        return self._tensor.read(index)


class Given(LazyTensor):
    """A tensor that is there already, as in an update of weights."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._tensor, self.name, self.shape, self.dtype = tensor, name, tuple(tensor.shape), tensor.dtype

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        return self._tensor[index] if index else self._tensor


class _Made:
    """What a rule makes of several tensors of a checkpoint. Names and shapes are known before any is read."""

    def __init__(self, rule: Any, name: str, shim: _Shim) -> None:
        self._rule, self._name, self._shim = rule, name, shim
        self.sources: list[tuple[str, LazyTensor]] = []

    def tensors(self) -> list[LazyTensor]:
        made = self._convert(lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"))
        return [_Part(self, name, tensor) for name, tensor in made.items()]

    def read(self, name: str) -> Tensor:
        return self._convert(lambda one: one.read())[name]

    def _convert(self, read: Any) -> dict[str, Tensor]:
        rule = deepcopy(self._rule)
        for pattern, source in self.sources:
            rule.add_tensor(self._name, source.name, pattern, lambda source=source: read(source))
        made = rule.convert(self._name, model=self._shim, config=self._shim.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


class _Part(LazyTensor):
    def __init__(self, made: _Made, name: str, tensor: Tensor) -> None:
        self._made, self.name, self.shape, self.dtype = made, name, tuple(tensor.shape), tensor.dtype

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        whole = self._made.read(self.name)
        return whole[index] if index else whole


class _Shim:
    """What rules ask of a model: its configuration, and the shapes of its parameters."""

    def __init__(self, config: Any, state: Mapping[str, Tensor]) -> None:
        self.config, self._state = config, state

    def get_parameter(self, name: str) -> Tensor:
        return self._state[name]


class Names:
    """How the tensors of a checkpoint become those of `model`, a model of transformers that still has its own layers.

    `prefix` is what its base model is called in the model with a head.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self.state: dict[str, Tensor] = dict(model.state_dict())
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._rules = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._rules for pattern in rule.source_patterns}
        self._shim = _Shim(model.config, self.state)
        self._prefix = str(getattr(model, "base_model_prefix", ""))
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in (*ignored, r"rotary_emb\.inv_freq$")]
        #: names of experts that frame computes, which take their tensors apart
        self.apart: set[str] = set()
        #: name of a tensor → another parameter that it fills too
        self.also: dict[str, str] = {}

    def convert(self, tensors: Iterable[LazyTensor]) -> Iterator[LazyTensor]:
        """Yields what parameters are called, in place of the tensors of a checkpoint; leaves out what is ignored."""
        made: dict[str, _Made] = {}
        for tensor in tensors:
            name, pattern = self._renamed(tensor.name)
            if name not in self.state and any(one.search(tensor.name) for one in self._ignored):
                continue
            if name in self.also:
                yield _Renamed(tensor, self.also[name])
            if pattern is None:
                yield _Renamed(tensor, name)
            elif (of_expert := self._of_expert(tensor.name, name, pattern)) is not None:
                yield _Renamed(tensor, of_expert)
            else:
                found = made.setdefault(name, _Made(self._by_pattern[pattern], name, self._shim))
                found.sources.append((pattern, tensor))
        for found in made.values():
            found.sources.sort(key=lambda pair: _natural(pair[1].name))
            yield from found.tensors()

    def _renamed(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        given = (self._prefix, self.state)
        found, pattern = rename_source_key(name, self._renamings, self._rules, *given)
        if found not in self.state and name in self.state:
            found, pattern = rename_source_key(name, [], [], *given)
        return found, pattern

    def _of_expert(self, name: str, made: str, pattern: str) -> str | None:
        """What frame calls the tensor `name` of one expert, where it computes the experts that have `made`."""
        experts = made.rpartition(".")[0]
        if experts not in self.apart:
            return None
        from transformers.core_model_loading import apply_renamings

        renamed = apply_renamings(name, self._renamings)
        if not renamed.startswith(f"{experts}."):
            renamed = f"{self._prefix}.{renamed}"
        if (number := re.match(rf"{re.escape(experts)}\.(\d+)\.", renamed)) is None:
            return None
        rule = self._by_pattern[pattern]
        operations = tuple(type(one).__name__ for one in rule.operations)
        if operations == _STACK_AND_JOIN and len(rule.source_patterns) == 2:
            part = (_GATE, _UP)[rule.source_patterns.index(pattern)]
        elif operations == _STACK and made.endswith(_DOWN):
            part = _DOWN
        else:
            return None
        return f"{experts}.{number[1]}.{part}.weight"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
