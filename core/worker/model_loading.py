"""From a checkpoint folder to a model on the device: the configuration object, the class, the weights."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ..config.checkpoint import Checkpoint
from ..config.tree import FrameConfig
from ..interfaces.model import Groups, Model
from ..interfaces.platform import Platform
from ..layers.build import ModelBuild
from ..layers.weights import load_weights
from ..parallel.group import SingleGroup
from ..registry import Registry
from .model_config import ModelConfig

KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights in place, and how long that took."""

    model: Model
    build: ModelBuild
    weights_bytes: int
    seconds: float


def resolve_dtype(config: FrameConfig, checkpoint: Checkpoint, platform: Platform) -> torch.dtype:
    """The element type of weights and activations."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)  # type: ignore[no-any-return]
    return platform.auto_dtype(getattr(torch, checkpoint.dtype))


def load_model(config: FrameConfig, checkpoint: Checkpoint, platform: Platform, registry: Registry) -> LoadedModel:
    """Builds the model of the checkpoint's architecture on the platform's device and loads its weights."""
    start = time.perf_counter()
    dtype = resolve_dtype(config, checkpoint, platform)
    group = SingleGroup()
    kv_name = config.cache.kv_cache_dtype
    build = ModelBuild(
        config=ModelConfig(checkpoint.text),
        dtype=dtype,
        device=platform.device,
        ops=platform.ops(),
        groups=Groups(tensor=group, pipeline=group, expert=group),
        block_size=config.cache.block_size,
        kv_dtype=dtype if kv_name == "auto" else KV_DTYPES.get(kv_name) or getattr(torch, kv_name),
        device_type=platform.device_type,
        deterministic=config.model.deterministic,
        max_model_len=checkpoint.max_model_len,
    )
    model_class = registry.resolve(registry.choose("model", checkpoint.architecture))
    with platform.memory().pool("weights"):
        model = model_class(build=build)
        loader = choose_loader(config, checkpoint, registry)
        load_weights(model, loader)
    model.requires_grad_(False)
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return LoadedModel(model.eval(), build, weights_bytes, time.perf_counter() - start)


def choose_loader(config: FrameConfig, checkpoint: Checkpoint, registry: Registry) -> Any:
    """The weight loader named by `load_format`, or for "auto" the preferred one that can read the folder."""
    name = config.load.load_format
    if name != "auto":
        loader = registry.make("loader", name, config, checkpoint.folder)
        reason = loader.supports(checkpoint.folder)
        if reason:
            raise ValueError(f"load format {name!r} cannot read {checkpoint.folder}: {reason}")
        return loader
    reasons = []
    for provider in registry.providers("loader"):
        loader = registry.make("loader", provider.name, config, checkpoint.folder)
        reason = loader.supports(checkpoint.folder)
        if not reason:
            return loader
        reasons.append(f"{provider.name}: {reason}")
    raise ValueError(f"no weight loader can read {checkpoint.folder}: {'; '.join(reasons)}")
