"""Finds what an architecture is in transformers: its configuration, its class, and the class made without memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

#: What config.json says that is about files, not about the model.
_NOT_FOR_CONFIG = ("model_type", "auto_map", "transformers_version", "_name_or_path", "quantization_config")
_HEADLESS = ("ForSequenceClassification", "RewardModel")


class NoClassError(ValueError):
    """Why transformers' class cannot be made, in a sentence."""


def find_class(architecture: str, hf: Mapping[str, Any]) -> type[Any]:
    """The class of transformers called `architecture`; raises `NoClassError`.

    `hf` is config.json. Code that lies beside a checkpoint is never run.
    """
    import transformers

    found = getattr(transformers, architecture, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    if hf.get("auto_map"):
        raise NoClassError(f"{architecture} is code of the checkpoint's own (auto_map), which frame does not run")
    raise NoClassError(f"transformers {transformers.__version__} has no class {architecture}")


def make_config(hf: Mapping[str, Any]) -> Any:
    """The configuration object of config.json; raises `NoClassError` for a model type that transformers lacks."""
    from transformers import AutoConfig

    values = {key: value for key, value in hf.items() if key not in _NOT_FOR_CONFIG}
    try:
        return AutoConfig.for_model(str(hf.get("model_type", "")), **json.loads(json.dumps(values)))
    except ValueError as error:
        raise NoClassError(f"transformers has no configuration for model type {hf.get('model_type')!r}") from error


def make_model(kind: type[Any], config: Any, dtype: torch.dtype, attention: str = "") -> Any:
    """A model of class `kind` on the meta device, whose attention calls what is registered as `attention`, if given."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    given = {"attn_implementation": attention, "experts_implementation": attention} if attention else {}
    if attention and not (attention in ALL_ATTENTION_FUNCTIONS and attention in ALL_EXPERTS_FUNCTIONS):
        AttentionInterface.register(attention, _nothing)
        ExpertsInterface.register(attention, _nothing)
    config.use_cache = False
    with torch.device("meta"):
        made = kind._from_config(config, dtype=dtype, **given)
    return made.eval()


def _nothing(*arguments: Any, **more: Any) -> None:
    raise RuntimeError("attention or experts were called before they were there")


def base_of(model: nn.Module) -> tuple[nn.Module, str]:
    """(module, name in it) of the part whose states a head reads: `forward` of a model with a head calls that."""
    names = [getattr(model, "base_model_prefix", ""), "model", "transformer"]
    name = next((name for name in names if name and isinstance(getattr(model, name, None), nn.Module)), "")
    if not name:
        raise NoClassError(f"{type(model).__name__} has no part that gives hidden states apart from its head")
    inner = getattr(model, name)
    parts = dict(inner.named_children())
    if "encoder" not in parts and hasattr(parts.get("decoder"), "base_model_prefix"):
        return inner, "decoder"  # a model around a decoder alone, past which its head calls
    return model, name


def generates(kind: type[Any]) -> bool:
    """Whether the class has a head over the vocabulary."""
    return hasattr(kind, "prepare_inputs_for_generation")


def is_headless(architecture: str, kind: type[Any]) -> bool:
    """Whether frame's own head goes on the base model: for embeddings and scores by a model that generates."""
    return architecture.endswith(_HEADLESS) or not generates(kind)
