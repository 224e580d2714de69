"""Chooses the plugin's class for a checkpoint's architecture. Knows no weight."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..config.checkpoint import Checkpoint
from ..interfaces.provider import Provider
from .registry import Registry

if TYPE_CHECKING:
    from ..interfaces.model import Model


def choose_model(checkpoint: Checkpoint, registry: Registry) -> type[Model]:
    """The class of the checkpoint's architecture."""
    found: type[Model] = registry.resolve(model_provider(checkpoint, registry))
    return found


def model_provider(checkpoint: Checkpoint, registry: Registry) -> Provider:
    """The provider of the checkpoint's architecture, or the one that the user chose.

    A pooling checkpoint of an architecture that no plugin offers ("Qwen3ForSequenceClassification", "Qwen3Model") takes
    the family's generating model, which is built with another head.
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
