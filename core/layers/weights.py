"""Which parameter each checkpoint tensor fills: every layer lists its slots, and loading matches names with them.

Loaders know file formats, and model classes list how names are changed; nothing of either is here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..interfaces.loader import LazyTensor, WeightLoader, fill_each
from ..interfaces.model import Model

Index = tuple[slice, ...]
#: Takes (tensor, read) pairs and copies what each `read` returns into its tensor.
Fill = Callable[[Iterable[tuple[Tensor, Callable[[], Tensor]]]], None]
_MAX_NAMED = 6


class WeightError(ValueError):
    """Checkpoint and model do not fit: names the tensors that are missing, unexpected or of a wrong shape."""


@dataclass(frozen=True)
class WeightSlot:
    """One checkpoint tensor (or a piece of it) and the region of a parameter that it fills.

    `shape` is the whole tensor's in the checkpoint and `index` the piece of it that this rank takes. The piece, its
    last two axes swapped when `transposed`, is copied into `parameter[region]`. A slot without parameter is a tensor
    that may be present and is not read; an `optional` one may be missing. The empty shape is a single number, however
    it is stored. A fused tensor names in `covers` the tensors that it stands for. One whose parameter is on the meta
    device belongs to another pipeline stage: its tensor must be there and is not read.
    """

    name: str
    shape: tuple[int, ...]
    parameter: Tensor | None
    index: Index = ()
    region: Index = ()
    transposed: bool = False
    covers: tuple[str, ...] = ()
    optional: bool = False

    @property
    def is_read(self) -> bool:
        """Whether this rank reads the tensor."""
        return self.parameter is not None and not self.parameter.is_meta

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a checkpoint tensor of `shape` may fill this slot."""
        return tuple(shape) == self.shape or (self.shape == () and tuple(shape) == (1,))

    def target(self, parameter: Tensor) -> Tensor:
        """The region that the piece fills, its axes in the order of the checkpoint's."""
        region: Tensor = parameter.data[self.region] if self.region else parameter.data
        return region.transpose(-1, -2) if self.transposed else region

    def write(self, piece: Tensor) -> None:
        """Copies `piece` (already cut to `index`) into place, casting to the parameter's dtype."""
        if self.parameter is not None:
            self.target(self.parameter).copy_(piece)


class WeightMap:
    """The slots of every layer of a model, by checkpoint name."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._renames = [(re.compile(pattern), replacement) for pattern, replacement in model.renames]
        self._ignores = [re.compile(pattern) for pattern in model.ignores]
        self._slots: dict[str, list[WeightSlot]] = {}
        absent = [layer for module in model.modules() for layer in getattr(module, "absent", ())]
        for module in (part for whole in (model, *absent) for part in whole.modules()):
            for slot in getattr(module, "weight_slots", list)():
                self._slots.setdefault(slot.name, []).append(slot)

    def required(self) -> Iterator[WeightSlot]:
        """The slots whose tensors a complete checkpoint has, as such or in a tensor that covers them."""
        for slot in (one for slots in self._slots.values() for one in slots):
            if slot.parameter is not None and not slot.covers and not slot.optional:
                yield slot

    def match(self, name: str) -> Sequence[WeightSlot] | None:
        """The slots of a checkpoint tensor; empty when it is ignored, None when no layer knows it."""
        if any(pattern.fullmatch(name) for pattern in self._ignores):
            return ()
        for pattern, replacement in self._renames:
            name = pattern.sub(replacement, name)
        return self._slots.get(name)

    def plan(self, tensors: Iterable[LazyTensor], complete: bool) -> list[tuple[LazyTensor, Sequence[WeightSlot]]]:
        """Pairs tensors with their slots; raises `WeightError` with everything that does not fit."""
        found: list[tuple[LazyTensor, Sequence[WeightSlot]]] = []
        unexpected: list[str] = []
        misshaped: list[str] = []
        covered: set[str] = set()
        for tensor in tensors:
            slots = self.match(tensor.name)
            if slots is None:
                unexpected.append(tensor.name)
                continue
            covered.update(name for slot in slots for name in (slot.covers or (slot.name,)))
            if slots and slots[0].parameter is not None and not slots[0].fits(tensor.shape):
                misshaped.append(_misshaped(tensor.name, tensor.shape, slots[0].shape))
            else:
                found.append((tensor, slots))
        needed = dict.fromkeys(slot.name for slot in self.required()) if complete else ()
        missing = [name for name in needed if name not in covered]
        if missing or unexpected or misshaped:
            raise WeightError(self._complaint(missing, unexpected, misshaped))
        return found

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies whole tensors by checkpoint name; raises `WeightError` for one that does not fit. Partial is fine."""
        names: set[str] = set()
        for name, tensor in pairs:
            slots = self.match(name)
            if slots is None:
                raise WeightError(self._complaint([], [name], []))
            for slot in slots:
                if slot.parameter is None:
                    continue
                if not slot.fits(tensor.shape):
                    raise WeightError(self._complaint([], [], [_misshaped(name, tensor.shape, slot.shape)]))
                if slot.is_read:
                    slot.write(tensor[slot.index] if slot.index else tensor)
            names.add(name)
        return names

    def _complaint(self, missing: list[str], unexpected: list[str], misshaped: list[str]) -> str:
        kinds = (("missing", missing), ("unexpected", unexpected), ("of a wrong shape", misshaped))
        found = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names)
        return f"the checkpoint does not fit {type(self._model).__name__}: tensors {found}"


def load_weights(model: Model, loader: WeightLoader, fill: Fill | None = None) -> int:
    """Reads each tensor of `loader` once, only this rank's piece of it, into the parameters of `model`.

    Every name and shape is checked before the first byte is read. `fill` is the platform's `Streams.fill`; without it
    tensors are copied one by one. Returns the bytes read. Raises `WeightError`, or what the loader raises.
    """
    weights = WeightMap(model)
    plan = weights.plan(loader.tensors(), loader.complete)
    pieces: list[tuple[Tensor, Callable[[], Tensor]]] = []
    num_bytes = 0
    filled: set[int] = set()
    for tensor, slots in plan:
        for slot in slots:
            if slot.parameter is not None and slot.is_read:
                target = slot.target(slot.parameter)
                pieces.append((target, partial(tensor.read, slot.index)))
                num_bytes += target.numel() * tensor.dtype.itemsize
                filled.add(id(slot.parameter))
    (fill or fill_each)(pieces)
    for slot in () if loader.complete else weights.required():
        if slot.parameter is not None and slot.is_read and id(slot.parameter) not in filled:
            target = slot.target(slot.parameter)  # of one of many experts, behind an axis of one
            loader.fill(slot.name, target.flatten(0, target.dim() - len(slot.shape)), slot.shape, slot.index)
    model.finish_load()
    return num_bytes


def _misshaped(name: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    return f"{name} is {list(shape)}, expected {list(expected)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
