"""Chooses the model plugin for a checkpoint, by its architecture."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..config.checkpoint import Checkpoint
from ..interfaces.provider import Provider
from .registry import Registry

if TYPE_CHECKING:
    from ..interfaces.model import Model


def choose_model(checkpoint: Checkpoint, registry: Registry) -> type[Model]:
    """Returns the class of the model for the checkpoint, see `model_provider`."""
    found: type[Model] = registry.resolve(model_provider(checkpoint, registry))
    return found


def model_provider(checkpoint: Checkpoint, registry: Registry) -> Provider:
    """Returns the provider that the user chose, else the one of the checkpoint's architecture.

    For a pooling checkpoint whose architecture no plugin offers ("Qwen3ForSequenceClassification", "Qwen3Model") that
    is the family's generating model, which is built with another head.
    """
    if checkpoint.model_plugin is not None:
        return registry.choose("model", checkpoint.model_plugin)
    architecture = checkpoint.architecture
    if checkpoint.pooling is not None:
        offered = {provider.name for provider in registry.providers("model")}
        stem = re.sub(r"(ForSequenceClassification|RewardModel|Model)$", "", architecture)
        relatives = (architecture, f"{stem}ForCausalLM", f"{stem}LMHeadModel")
        architecture = next((name for name in relatives if name in offered), architecture)
    return registry.choose("model", architecture)
