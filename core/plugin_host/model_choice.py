"""Chooses the model plugin for a checkpoint, by its architecture, and reads config.json as that plugin says."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ..config.checkpoint import Checkpoint
from ..config.model_config import ConfigReading, ModelConfig
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
    name = _own_model(checkpoint, registry)
    return _any_model(checkpoint, registry) if name is None else registry.choose("model", name)


def read_model_config(checkpoint: Checkpoint, registry: Registry) -> ModelConfig:
    """The configuration of the text model, read as the tag "config" of the checkpoint's model says.

    Imports no model. Raises `PluginError` for a tag that is not JSON of a `ConfigReading`.
    """
    name = _own_model(checkpoint, registry)
    if name is None:
        return ModelConfig(checkpoint.text)
    provider = registry.choose("model", name)
    try:
        return ModelConfig(checkpoint.text, ConfigReading(**json.loads(provider.tags.get("config", "{}"))))
    except (TypeError, ValueError) as error:
        fields = ", ".join(ConfigReading.__dataclass_fields__)
        raise PluginError(
            f"tag 'config' of model {provider.name!r} must be a JSON object of {fields}: {error}"
        ) from None


def _own_model(checkpoint: Checkpoint, registry: Registry) -> str | None:
    """The name of the model that the user chose or that is made for the architecture; None if that is one for any."""
    if checkpoint.model_plugin is not None:
        return checkpoint.model_plugin
    architecture = checkpoint.architecture
    offered = {provider.name for provider in registry.providers("model")}
    if checkpoint.pooling is not None:
        stem = re.sub(r"(ForSequenceClassification|RewardModel|Model)$", "", architecture)
        relatives = (architecture, f"{stem}ForCausalLM", f"{stem}LMHeadModel")
        architecture = next((name for name in relatives if name in offered), architecture)
    native = checkpoint.model_impl != "transformers"
    if native and (architecture.rpartition(":")[2] in offered or checkpoint.model_impl == "frame"):
        return architecture
    return None


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
