"""What transformers computes when it makes a model and keeps in no file: rope tables and other buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .trial import UnfitError


def plain_ropes(model: nn.Module) -> None:
    """Keeps rope modules from looking at positions to choose frequencies: `fix_ropes` chooses them."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind is not None:
            module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"  # type: ignore[assignment]


def fill_buffers(model: Any, device: torch.device, max_len: int) -> None:
    """Gives `model`, made on the meta device, its buffers; those in files are still to be loaded.

    Rope frequencies that depend on lengths are those of `max_len` tokens, whatever a request's length.
    Raises `UnfitError` for a buffer that the class does not compute again.
    """
    kinds = [(module, module.rope_type) for module in model.modules() if hasattr(module, "rope_type")]
    for owner, name, module in _owned(model):
        meta = {key: one for key, one in module.named_buffers(recurse=False) if one.is_meta}
        for key, one in meta.items():
            module._buffers[key] = torch.zeros(one.shape, dtype=one.dtype, device=device)
        computed = [key for key in meta if key in module._non_persistent_buffers_set]
        if computed and device.type != "meta":
            first = _computed(owner, module, computed, 0)
            second = _computed(owner, module, computed, 1)
            unset = [key for key in computed if not torch.equal(first[key], second[key])]
            if unset:
                raise UnfitError(f"its buffer {name}.{unset[0]} is in no file, and its class does not compute it again")
    for module, kind in kinds if device.type != "meta" else ():
        for layer, one in kind.items() if isinstance(kind, dict) else [(None, kind)]:
            _fix(module, one, layer, device, max_len)
    plain_ropes(model)


def _owned(model: Any) -> list[tuple[Any, str, nn.Module]]:
    """(the model of transformers whose part it is, name, module) of every module."""
    from transformers import PreTrainedModel

    found: list[tuple[Any, str, nn.Module]] = []

    def visit(module: nn.Module, name: str, owner: Any) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        found.append((owner, name, module))
        for key, child in module.named_children():
            visit(child, f"{name}.{key}" if name else key, owner)

    visit(model, "", model)
    return found


def _computed(owner: Any, module: nn.Module, keys: Iterable[str], before: int) -> dict[str, Tensor]:
    """The buffers `keys` as `owner` sets them where they were full of `before`."""
    for key in keys:
        module._buffers[key].fill_(before)  # type: ignore[union-attr]
    with torch.no_grad():
        owner._init_weights(module)
    return {key: module._buffers[key].clone() for key in keys}  # type: ignore[union-attr]


def _fix(module: Any, kind: str, layer: str | None, device: torch.device, max_len: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = f"{layer}_" if layer else ""
    parameters = module.config.rope_parameters[layer] if layer else module.config.rope_parameters
    if kind == "longrope":
        original = parameters["original_max_position_embeddings"]
        length = original + 1 if max_len > original else None
    elif "dynamic" in kind and max_len > module.max_seq_len_cached:
        length = max_len
    else:
        return
    if length is None:
        return
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, device, seq_len=length, **({"layer_type": layer} if layer else {})
    )
    getattr(module, f"{prefix}inv_freq").copy_(frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
