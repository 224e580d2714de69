"""A rank's weights as they are once loaded: its parameters by name, after quantising and repacking."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor

from ..interfaces.loader import LazyTensor
from ..interfaces.model import Model
from .filling import Fill


def state_of(model: Model) -> dict[str, Tensor]:
    """The tensors that loading has filled, or made of what it filled, by their names in the model; each once."""
    filled = {
        id(slot.parameter)
        for module in model.modules()
        for slot in getattr(module, "weight_slots", list)()
        if slot.is_read
    }
    found = {name: parameter.data for name, parameter in model.named_parameters() if not parameter.is_meta}
    found |= {name: buffer for name, buffer in model.named_buffers() if id(buffer) in filled}
    return found


def load_state(model: Model, tensors: Iterable[LazyTensor], fill: Fill) -> int:
    """Copies the tensors of a state into the model; returns their bytes. Raises `ValueError` for one that differs."""
    wanted = state_of(model)
    found = {tensor.name: tensor for tensor in tensors}
    if odd := sorted(wanted.keys() ^ found.keys()):
        raise ValueError(f"the stored state does not fit {type(model).__name__}: only one of the two has {odd[0]}")
    for name, target in wanted.items():
        stored = found[name]
        if tuple(target.shape) != tuple(stored.shape) or target.dtype != stored.dtype:
            here, there = (f"{each.dtype} {list(each.shape)}" for each in (target, stored))
            raise ValueError(f"the stored state does not fit {type(model).__name__}: {name} is {there}, needed {here}")
    fill([(target, partial(found[name].read, ())) for name, target in wanted.items()])
    model.finish_load()  # of what is made of weights; layers with a method have nothing to finish
    return sum(target.nbytes for target in wanted.values())
