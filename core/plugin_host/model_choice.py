"""Chooses the model plugin for a checkpoint, by its architecture."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..config.checkpoint import Checkpoint
from ..interfaces.provider import PluginError, Provider
from .registry import Registry

if TYPE_CHECKING:
    from ..interfaces.model import Model


def choose_model(checkpoint: Checkpoint, registry: Registry) -> type[Model]:
    """Returns the class of the model for the checkpoint, see `model_provider`."""
    found: type[Model] = registry.resolve(model_provider(checkpoint, registry))
    return found


def model_provider(checkpoint: Checkpoint, registry: Registry) -> Provider:
    """Returns the provider that the user chose, else the one of the checkpoint's architecture.

    Where no plugin offers that, or the user asks for transformers' class, it is the first of those called "*" that
    supports config.json. For a pooling checkpoint whose architecture no plugin offers
    ("Qwen3ForSequenceClassification", "Qwen3Model") it is the family's generating model, built with another head.
    """
    if checkpoint.model_plugin is not None:
        return registry.choose("model", checkpoint.model_plugin)
    architecture = checkpoint.architecture
    offered = {provider.name for provider in registry.providers("model")}
    if checkpoint.pooling is not None:
        stem = re.sub(r"(ForSequenceClassification|RewardModel|Model)$", "", architecture)
        relatives = (architecture, f"{stem}ForCausalLM", f"{stem}LMHeadModel")
        architecture = next((name for name in relatives if name in offered), architecture)
    native = checkpoint.model_impl != "transformers"
    if native and (architecture.rpartition(":")[2] in offered or checkpoint.model_impl == "frame"):
        return registry.choose("model", architecture)
    return _any_model(checkpoint, registry)


def _any_model(checkpoint: Checkpoint, registry: Registry) -> Provider:
    """The model that serves an architecture without one of its own; raises `PluginError` with each one's reason."""
    reasons = []
    for provider in registry.providers("model"):
        if provider.name.startswith("*"):
            model: type[Model] = registry.resolve(provider)
            if (reason := model.supports(checkpoint.architecture, checkpoint.hf)) is None:
                return provider
            reasons.append(reason)
    if checkpoint.model_impl == "transformers":
        found = "; ".join(dict.fromkeys(reasons[:1] + reasons[-1:])) or "no plugin wraps classes of transformers"
        raise PluginError(f"model_impl 'transformers' cannot serve {checkpoint.architecture!r}: {found}")
    try:
        return registry.choose("model", checkpoint.architecture)  # which says what there is
    except PluginError as error:
        raise PluginError("; ".join(dict.fromkeys((str(error), *reasons[:1], *reasons[-1:])))) from None
