"""The parameters of a class that frame puts nothing in the place of: they are loaded as they are, on each rank."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from frame.layers import WeightSlot


def fill_parameters(model: Any, device: torch.device) -> list[WeightSlot]:
    """Gives `model` memory for the parameters that are still on the meta device, and returns what fills them.

    Also for buffers that are in files.
    """
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    missing = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    made: dict[int, nn.Parameter] = {}
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if type(module).__module__.startswith("frame."):
            continue
        for key, old in list(module._parameters.items()):
            if old is None:
                continue
            full = f"{name}.{key}" if name else key
            if id(old) not in made:
                made[id(old)] = _parameter(old, full, device, kept)
            module._parameters[key] = made[id(old)]
            names.setdefault(id(old), []).append(full)
    slots = []
    for key, parameter in made.items():
        first, *others = sorted(names[key], key=lambda name: name in tied)
        optional = any(one.search(first) for one in missing)
        shape = tuple(parameter.shape)
        slots.append(WeightSlot(first, shape, parameter, optional=optional))
        slots += [WeightSlot(name, shape, parameter, covers=(first,), optional=True) for name in others]
    return slots + _buffers(model)


def _parameter(old: Tensor, name: str, device: torch.device, kept: Any) -> nn.Parameter:
    whole = any(re.search(rf"(^|\.){re.escape(one).replace(chr(92) + '*', '.*')}(\.|$)", name) for one in kept)
    dtype = torch.float32 if whole and old.is_floating_point() else old.dtype
    return nn.Parameter(torch.empty(old.shape, dtype=dtype, device=device), requires_grad=False)


def _buffers(model: nn.Module) -> list[WeightSlot]:
    slots = []
    for name, module in model.named_modules():
        if type(module).__module__.startswith("frame."):
            continue
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                slots.append(WeightSlot(f"{name}.{key}" if name else key, tuple(buffer.shape), buffer, optional=True))
    return slots
