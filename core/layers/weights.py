"""Which parameter each checkpoint tensor fills: every layer lists its slots, and loading matches names with them.

Loaders know file formats, and model classes list how names are changed; nothing of either is here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..interfaces.loader import LazyTensor, WeightLoader, fill_each
from ..interfaces.model import Model
from .filling import Fill, Filling, Piece
from .weight_slot import WeightSlot as WeightSlot

_MAX_NAMED = 6


class WeightError(ValueError):
    """Checkpoint and model do not fit: names the tensors that are missing, unexpected or of a wrong shape."""


class WeightMap:
    """The slots of every layer of a model, by checkpoint name."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._renames = [(re.compile(pattern), replacement) for pattern, replacement in model.renames]
        self._ignores = [re.compile(pattern) for pattern in model.ignores]
        self._slots: dict[str, list[WeightSlot]] = {}
        self._layers: dict[int, Any] = {}  # by the slot's id: the layer whose loading begins with it
        absent = [layer for module in model.modules() for layer in getattr(module, "absent", ())]
        for module in (part for whole in (model, *absent) for part in whole.modules()):
            for slot in getattr(module, "weight_slots", list)():
                self._slots.setdefault(slot.name, []).append(slot)
                if slot.is_read and hasattr(module, "begin_load"):
                    self._layers[id(slot)] = module

    def required(self) -> Iterator[WeightSlot]:
        """The slots whose tensors a complete checkpoint has, as such or in a tensor that covers them."""
        for slot in (one for slots in self._slots.values() for one in slots):
            if slot.parameter is not None and not slot.covers and not slot.optional:
                yield slot

    def match(self, name: str) -> Sequence[WeightSlot] | None:
        """The slots of a checkpoint tensor; empty when it is ignored, None when no layer knows it."""
        if any(pattern.fullmatch(name) for pattern in self._ignores):
            return ()
        return self._slots.get(self._renamed(name))

    def _renamed(self, name: str) -> str:
        for pattern, replacement in self._renames:
            name = pattern.sub(replacement, name)
        return name

    def layer(self, slot: WeightSlot) -> Any:
        """The layer to be told before the slot is filled, by `begin_load`; None without one."""
        return self._layers.get(id(slot))

    def plan(self, tensors: Iterable[LazyTensor], complete: bool) -> list[tuple[LazyTensor, Sequence[WeightSlot]]]:
        """Pairs tensors with their slots; raises `WeightError` with everything that does not fit."""
        found: list[tuple[LazyTensor, Sequence[WeightSlot]]] = []
        unexpected: list[str] = []
        misfits: list[str] = []
        covered: set[str] = set()
        stored = list(self._model.convert(tensors))
        shapes = {self._renamed(tensor.name): tuple(tensor.shape) for tensor in stored}
        for tensor in stored:
            slots = self.match(tensor.name)
            if slots is None:
                unexpected.append(tensor.name)
                continue
            slots = _fitting(slots, tensor.shape, shapes)
            covered.update(name for slot in slots for name in (slot.covers or (slot.name,)))
            if slots and (reason := slots[0].misfit(tensor.name, tensor.shape, tensor.dtype)):
                misfits.append(reason)
            else:
                found.append((tensor, slots))
        needed = dict.fromkeys(slot.name for slot in self.required()) if complete else ()
        missing = [name for name in needed if name not in covered]
        if missing or unexpected or misfits:
            raise WeightError(self._complaint(missing, unexpected, misfits))
        return found

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies whole tensors by checkpoint name; raises `WeightError` for one that does not fit. Partial is fine."""
        names: set[str] = set()
        for name, tensor in pairs:
            slots = self.match(name)
            if slots is None:
                raise WeightError(self._complaint([], [name], []))
            for slot in _fitting(slots, tensor.shape, {}):
                if reason := slot.misfit(name, tensor.shape, tensor.dtype):
                    raise WeightError(self._complaint([], [], [reason]))
                if slot.is_read:
                    if (layer := self.layer(slot)) is not None:
                        layer.begin_load()
                    slot.write(tensor[slot.index] if slot.index else tensor)
            names.add(name)
        return names

    def _complaint(self, missing: list[str], unexpected: list[str], misfits: list[str]) -> str:
        kinds = (("missing", missing), ("unexpected", unexpected), ("of a wrong shape or type", misfits))
        found = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names)
        return f"the checkpoint does not fit {type(self._model).__name__}: tensors {found}"


def load_weights(model: Model, loader: WeightLoader, fill: Fill | None = None) -> int:
    """Reads each tensor of `loader` once, only this rank's piece of it, into the parameters of `model`.

    Every name, shape and type is checked before the first byte is read. `fill` is the platform's `Streams.fill`;
    without it tensors are copied one by one. Layers that stage are loaded one after the other. Returns the bytes read.
    Raises `WeightError`, or what the loader raises.
    """
    if (restored := loader.restore(model, fill or fill_each)) is not None:
        model.finish_load()  # of what is made of weights; layers with a method have nothing to finish
        return restored
    weights, filling = WeightMap(model), Filling(loader, fill or fill_each)
    plan = weights.plan(loader.tensors(), loader.complete)
    pieces = [Piece(slot, tensor, tensor.dtype) for tensor, slots in plan for slot in slots if slot.is_read]
    if not loader.complete:
        filled = {id(piece.slot.parameter) for piece in pieces}
        others = [slot for slot in weights.required() if slot.is_read and id(slot.parameter) not in filled]
        pieces += [Piece(slot, None, slot.dtype or torch.float32) for slot in others]
    at_once: list[Piece] = []
    by_layer: dict[Any, list[Piece]] = {}
    for piece in pieces:
        layer = weights.layer(piece.slot)
        if layer is not None and layer.stages:
            by_layer.setdefault(layer, []).append(piece)
            continue
        if layer is not None:
            layer.begin_load()
        at_once.append(piece)
    filling.run(at_once)
    for layer, some in by_layer.items():
        layer.begin_load()
        filling.run(some)
        layer.finish_load()
    model.finish_load()
    return filling.num_bytes


def _fitting(
    slots: Sequence[WeightSlot], shape: Sequence[int], shapes: Mapping[str, tuple[int, ...]]
) -> Sequence[WeightSlot]:
    """Those of a tensor that may come in several shapes, here among `shapes`, which fit the one it has; else all."""
    fits = [slot for slot in slots if slot.parameter is None or slot.has_shape(shape)] or slots
    told = [slot for slot in fits if slot.beside is not None and shapes.get(slot.beside[0]) == slot.beside[1]]
    return told or [slot for slot in fits if slot.beside is None]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
