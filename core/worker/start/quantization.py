"""Which format the weights of a model have: the one that its checkpoint states, or one that they get in loading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...config.checkpoint import Checkpoint
from ...config.tree import FrameConfig
from ...interfaces.model import Model
from ...interfaces.provider import Provider
from ...interfaces.quantization import Quantization, QuantizationSpec, StoredTensor, Unquantized
from ...interfaces.setup import QuantizationSetup
from ...plugin_host.registry import Registry
from .loader_choice import choose_loader


def make_quantization(
    config: FrameConfig,
    checkpoint: Checkpoint,
    registry: Registry,
    model_class: type[Model],
    spec: QuantizationSpec,
) -> Quantization:
    """The format of the weights, before any of them is read.

    Raises `ValueError` for one that is unknown, contradicts the checkpoint, or cannot compute here.
    """
    name, stored = config.model.quantization, checkpoint.quantization
    if name is None and stored is None:
        return Unquantized()
    provider = _choose(registry, name, stored)
    tensors = {
        _renamed(tensor.name, model_class.renames): StoredTensor(tensor.dtype, tuple(tensor.shape))
        for tensor in choose_loader(config, checkpoint, registry).tensors()
    }
    setup = QuantizationSetup(spec, stored, tensors, model_class.renames)
    made: Quantization = registry.make("quantization", provider, setup, config)
    if reason := made.supports(spec):
        raise ValueError(f"quantization {provider.name!r} cannot be used on {spec.device}: {reason}")
    return made


def _choose(registry: Registry, name: str | None, stored: Mapping[str, Any] | None) -> Provider:
    """The format that is named, or the one that reads what is stored; raises `ValueError` where they disagree."""
    stored_as = (stored or {}).get("quant_method")
    method = "quantised without a quant_method" if stored_as is None else f"quantised as {stored_as!r}"
    if name is not None:
        provider = registry.choose("quantization", name)
        format_: type[Quantization] = registry.resolve(provider)
        if stored is not None and not format_.reads(stored):
            reads = _names(_readers(registry, stored)) or "none that is installed"
            raise ValueError(
                f"quantization {name!r} does not read the checkpoint, which is {method}; what reads it: {reads}"
            )
        if stored is None and not format_.online:
            online = (one for one in registry.providers("quantization") if registry.resolve(one).online)
            raise ValueError(
                f"quantization {name!r}: the checkpoint states no quantization_config, and of weights that are not "
                f"quantised can be made: {_names(online)}"
            )
        return provider
    found = _readers(registry, stored or {})
    if not found:
        raise ValueError(
            f"the weights of the checkpoint are {method}, which no quantization reads; "
            f"there are: {_names(registry.providers('quantization')) or 'none'}"
        )
    return found[0]


def _readers(registry: Registry, stored: Mapping[str, Any]) -> list[Provider]:
    """The formats that read a quantization_config, the preferred one first."""
    return [one for one in registry.providers("quantization") if registry.resolve(one).reads(stored)]


def _names(providers: Iterable[Provider]) -> str:
    return ", ".join(provider.name for provider in providers)


def _renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name
