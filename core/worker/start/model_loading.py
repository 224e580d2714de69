"""From a checkpoint folder to a model on the device: the configuration object, the class, the weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from frame.kept_weights.holder import NoHolder
from frame.weight_offload.start import weight_offload

from ...config.checkpoint import Checkpoint
from ...config.tree import FrameConfig
from ...interfaces.balancer import ExpertPlacement
from ...interfaces.collectives import Groups
from ...interfaces.model import Model
from ...interfaces.platform import Memory, MemorySnapshot, Platform
from ...interfaces.platform_steps import Steps
from ...interfaces.quantization import QuantizationSpec
from ...interfaces.setup import ModelSetup
from ...layers.build import Build
from ...layers.embedding import tied_tables
from ...layers.expert_map import ExpertMaps
from ...layers.experts import experts_of
from ...layers.methods import Methods
from ...layers.pooling_build import PoolingBuild
from ...layers.weights import load_weights
from ...plugin_host.model_choice import model_provider, read_model_config
from ...plugin_host.registry import Registry
from .adapters import make_adapters
from .expert_exchange import exchange_maker
from .load_progress import LoadProgress
from .loader_choice import choose_loader as choose_loader
from .numerics import model_digest
from .quantization import make_quantization

#: Seconds without more free memory after which nobody is taken to give any back.
GIVEN_BACK_SECONDS = 2.0
KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights in place, and its `model_digest`; `maps` where its experts are balanced."""

    model: Model
    build: Build
    digest: str
    weights_bytes: int
    maps: ExpertMaps | None = None


def compiled(loaded: LoadedModel, steps: Steps) -> LoadedModel:
    """`loaded` with its model prepared by the platform's compiler."""
    return replace(loaded, model=steps.compiler.prepare(loaded.model, steps.shapes))


def resolve_dtype(config: FrameConfig, checkpoint: Checkpoint, platform: Platform) -> torch.dtype:
    """The element type of weights and activations."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)  # type: ignore[no-any-return]
    return platform.auto_dtype(getattr(torch, checkpoint.dtype))


def load_model(
    config: FrameConfig,
    checkpoint: Checkpoint,
    platform: Platform,
    registry: Registry,
    groups: Groups,
    before: MemorySnapshot,
    holder: NoHolder,
) -> LoadedModel:
    """Builds the model of the checkpoint's architecture on the platform's device and loads its weights.

    `before` is the device's memory now; weights that `holder` finds are not read. Raises `ValueError` where it is too
    little, before any weight is read.
    """
    with platform.memory().pool("weights"):
        try:
            with holder.placing():
                model, build = build_model(config, checkpoint, platform, registry, groups)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"the weights do not fit {platform.device}: {before.free >> 20} MiB of its {before.total >> 20} MiB "
                "are free; divide the model, keep weights in host memory (cpu_offload_gb), or end what else uses it"
            ) from None
        copies = sum(table.weight.nbytes for table in tied_tables(model) if build.ops.packs(table.weight))
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) - build.offload.kept_bytes
        require_room(config, platform.memory(), before, held + copies)
        loader = choose_loader(config, checkpoint, registry)
        if (digest := holder.found(model)) is None:
            shown = config.load.use_tqdm_on_load and not model.share["rank"]
            progress = LoadProgress(platform.streams().fill, shown=shown)
            progress.report(load_weights(model, loader, progress.fill), model.share["rank"])
    model.requires_grad_(False)
    maps = make_maps(model, platform)  # outside of the pool: they stay while weights are dropped
    weights_bytes = copies + sum(one.nbytes for one in model.parameters()) - build.offload.saved_bytes
    online = build.methods.quantization.numerics if checkpoint.quantization is None else ""
    dtypes = build.dtype, build.kv_dtype, build.state_dtype
    digest_of = partial(model_digest, dtypes=dtypes, quantization=online)
    digest = digest or digest_of(checkpoint.hf, loader)
    holder.keep(model, digest, digest_of)
    return LoadedModel(model.eval(), build, digest, weights_bytes, maps)


def make_maps(model: nn.Module, platform: Platform) -> ExpertMaps | None:
    """Gives the layers of experts that are balanced their maps; None without any.

    Raises `ValueError` where layers are not alike.
    """
    layers = [layer for layer in experts_of(model) if layer.balanced]
    if not layers:
        return None
    sizes = {(layer.spec.num_experts, layer.num_all_slots) for layer in layers}
    if len(sizes) > 1:
        counts = ", ".join(str(experts) for experts, _ in sorted(sizes))
        raise ValueError(f"enable_eplb: the layers of the model have unlike numbers of experts ({counts})")
    ((num_experts, num_slots),) = sizes
    start = ExpertPlacement.initial(len(layers), num_experts, num_slots)
    maps = ExpertMaps(start, num_experts, platform.device, platform.streams().stage)
    for index, layer in enumerate(layers):
        layer.map = maps[index]
    return maps


def room_before(config: FrameConfig, memory: Memory) -> MemorySnapshot:
    """The device's memory before anything is loaded; raises `ValueError` where less is free than is asked for.

    Processes that have just ended may still give theirs back, so that it waits while more is free than ever before.
    """
    before, grown = memory.snapshot(), time.monotonic()
    most = before.free
    while True:
        try:
            require_room(config, memory, before)
            return before
        except ValueError:
            if time.monotonic() - grown > GIVEN_BACK_SECONDS:
                raise
        time.sleep(0.1)
        before = memory.snapshot()
        if before.free > most:
            most, grown = before.free, time.monotonic()


def require_room(config: FrameConfig, memory: Memory, before: MemorySnapshot, weights_bytes: int = 0) -> None:
    """Raises `ValueError` where the device had too little memory free `before`, as far as is known by now."""
    cache = config.cache
    is_sized = cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None
    needed = weights_bytes + (cache.kv_cache_memory_bytes or 0)
    if reason := memory.lacks(before, 0.0 if is_sized else cache.gpu_memory_utilization, needed):
        raise ValueError(reason)


def build_model(
    config: FrameConfig, checkpoint: Checkpoint, platform: Platform, registry: Registry, groups: Groups
) -> tuple[Model, Build]:
    """The model of the checkpoint's architecture on the platform's device, its weights not yet read."""
    dtype = resolve_dtype(config, checkpoint, platform)
    kv_name = config.cache.kv_cache_dtype
    provider = model_provider(checkpoint, registry)
    model_class = registry.resolve(provider)
    spec = QuantizationSpec(platform.device, dtype, groups.tensor.size, config.model.deterministic)
    quantization = make_quantization(config, checkpoint, registry, model_class, spec)
    build = _build_kind(config, checkpoint, model_class)(
        config=read_model_config(checkpoint, registry),
        dtype=dtype,
        device=platform.device,
        ops=platform.ops(),
        groups=groups,
        kv_dtype=dtype if kv_name == "auto" else KV_DTYPES.get(kv_name) or getattr(torch, kv_name),
        device_type=platform.device_type,
        state_dtype=getattr(torch, config.cache.mamba_ssm_cache_dtype.replace("auto", "float32")),
        deterministic=config.model.deterministic,
        max_model_len=checkpoint.max_model_len,
        pipeline_layers=config.executor.pipeline_layers,
        exchange=exchange_maker(config, registry, groups, platform, dtype),
        redundant_experts=config.expert_balance.num_redundant_experts if config.expert_balance.enable_eplb else None,
        offload=weight_offload(config, platform),
        methods=Methods(
            quantization,
            kv_is_set=kv_name != "auto",
            adapters=make_adapters(config, checkpoint, platform, registry, (dtype, model_class)),
        ),
    )
    model: Model = build.offload.finish(registry.make("model", provider, ModelSetup(build), config))
    model.share = {"architecture": checkpoint.architecture, "quantization": quantization.numerics, **_share(build)}
    return model, build


def _share(build: Build) -> dict[str, Any]:
    """Which rank of how many holds a part of the weights, and in which type."""
    pipeline, tensor, expert = build.groups.pipeline, build.groups.tensor, build.groups.expert
    inner = expert if expert.size > 1 else tensor
    sizes = {"tensor_parallel_size": tensor.size, "pipeline_parallel_size": pipeline.size, "expert_ranks": expert.size}
    stages = ",".join(map(str, build.pipeline_layers))
    rank = pipeline.rank * inner.size + inner.rank
    return {"rank": rank, "dtype": str(build.dtype).removeprefix("torch."), **sizes, "pipeline_layers": stages}


def _build_kind(config: FrameConfig, checkpoint: Checkpoint, model_class: type[Model]) -> Callable[..., Build]:
    """The class of the build: `PoolingBuild`, which replaces the head, where a generating model serves pooling."""
    plan = checkpoint.pooling
    keeps_head = config.model.convert == "none" and checkpoint.architecture.endswith(("ForCausalLM", "LMHeadModel"))
    if plan is None or model_class.output != "tokens" or keeps_head:
        return Build
    return partial(PoolingBuild, num_labels=0 if plan.purpose == "embed" else plan.num_labels)
