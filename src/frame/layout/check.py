"""Which divisions a model allows: refused before anything is loaded, with the sizes that would work.

A model says so itself: it is built without memory, for a rank whose peers are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch import nn

from frame.core.config.checkpoint import Checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.mesh import Mesh, Placement
from frame.core.interfaces.model import Model
from frame.core.interfaces.setup import ModelSetup
from frame.core.layers.build import Build
from frame.core.layers.experts import Experts
from frame.core.layers.stages import Layers, split_layers
from frame.core.ops import Ops
from frame.core.parallel.groups import unconnected_groups
from frame.core.plugin_host.model_choice import choose_model, model_provider, read_model_config
from frame.core.plugin_host.registry import Registry
from frame.transfers.first_check import check_connector

#: The largest size that is tried when one must be named that works.
MOST_RANKS = 64


class Sketch(Build):
    """Builds few of a model's layers, which stand for the others. `stages` are the layers of each stage."""

    stages: Sequence[range] = ()

    def layers(self, count: int, make: Callable[[int], nn.Module]) -> nn.ModuleList:
        """The first, a middle and the last one; raises `ValueError` where `count` cannot be divided into stages."""
        self.stages = split_layers(count, self.groups.pipeline.size, self.pipeline_layers)
        return Layers([make(index) for index in dict.fromkeys((0, count // 2, count - 1)) if index >= 0])


def check_layout(config: FrameConfig, mesh: Mesh, checkpoint: Checkpoint, registry: Registry) -> None:
    """Raises `ConfigError` where the model's layers cannot be divided over `mesh`, or its connector has a reason."""
    check_connector(config, mesh, registry)
    _check_stages(config, mesh, checkpoint, registry)
    _check_shared_contexts(config, mesh)
    _check_divided_tokens(config, mesh)
    _check_calculated_scales(config, mesh)
    if mesh.expert_parallel:
        layers = (
            layer
            for kind in (Sketch, Build)  # of the few layers of a sketch none may have experts
            for layer in sketch(config, checkpoint, registry, Mesh(), kind)[0].modules()
            if isinstance(layer, Experts)
        )
        if (layer := next(layers, None)) is None:
            name = choose_model(checkpoint, registry).__name__
            raise ConfigError(f"enable_expert_parallel: model {name} has no experts; leave it out")
        _check_slots(config, mesh, layer.spec.num_experts)

    why_not = partial(refusal, config, checkpoint, registry)
    for axis in ("tensor", "pipeline", "data", "prefill_context"):
        asked: int = getattr(mesh, axis)
        alone = Mesh(expert_parallel=mesh.expert_parallel)
        if asked > 1 and (reason := why_not(structs.replace(alone, **{axis: asked}))):
            if axis == "pipeline" and config.executor.pipeline_layers:  # which are for one size
                raise ConfigError(f"pipeline_layers: {reason}")
            tried = {size: structs.replace(alone, **{axis: size}) for size in range(1, MOST_RANKS + 1)}
            sizes = ", ".join(str(size) for size, one in tried.items() if why_not(one) is None) or "none"
            raise ConfigError(f"{axis}_parallel_size {asked}: {reason}; sizes that work: {sizes}")
    alone = Mesh(tensor=mesh.tensor, expert_parallel=mesh.expert_parallel)
    shared = {size: structs.replace(alone, decode_context=size) for size in _divisors(mesh.tensor)}
    if mesh.decode_context > 1 and (reason := why_not(shared[mesh.decode_context])):
        sizes = ", ".join(str(size) for size, one in shared.items() if why_not(one) is None)
        asked = mesh.decode_context
        raise ConfigError(f"decode_context_parallel_size {asked}: {reason}; sizes that work: {sizes}")


def _check_slots(config: FrameConfig, mesh: Mesh, num_experts: int) -> None:
    """Raises `ConfigError` where the slots of balanced experts do not divide over the ranks that share them."""
    if not config.expert_balance.enable_eplb:
        return
    ranks, redundant = len(mesh.ranks("expert", 0)), config.expert_balance.num_redundant_experts
    slots = num_experts + redundant
    if rest := slots % ranks:
        each = ranks // mesh.data if mesh.data > 1 else 1  # devices of an engine, whose number may change
        sizes = [str(size) for size in range(2, MOST_RANKS + 1) if slots % size == 0 and size % each == 0]
        but = f" but over {', '.join(sizes)}" if sizes else ""
        raise ConfigError(
            f"num_redundant_experts {redundant}: {slots} slots for {num_experts} experts do not divide over {ranks} "
            f"devices{but}; with num_redundant_experts {redundant + ranks - rest} they divide over {ranks}"
        )


def refusal(config: FrameConfig, checkpoint: Checkpoint, registry: Registry, mesh: Mesh) -> str | None:
    """Why the model's layers cannot be divided over the ranks of `mesh`; None where they can."""
    try:
        sketch(config, checkpoint, registry, mesh)
    except ConfigError:
        raise
    except ValueError as error:
        return str(error.__cause__ or error)
    return None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _check_shared_contexts(config: FrameConfig, mesh: Mesh) -> None:
    """Raises `ConfigError` where ranks cannot share the KV cache of a request, whatever the model."""
    if (asked := mesh.decode_context) == 1:
        return
    said = f"decode_context_parallel_size {asked}"
    if mesh.tensor % asked:
        sizes = ", ".join(map(str, _divisors(mesh.tensor)))
        raise ConfigError(f"{said} does not divide tensor_parallel_size {mesh.tensor}; sizes that work: {sizes}")
    _check_blocks(config, said, asked)


def _check_divided_tokens(config: FrameConfig, mesh: Mesh) -> None:
    """Raises `ConfigError` for what does not go with ranks that divide the tokens of a step."""
    if (asked := mesh.prefill_context) == 1:
        return
    said = f"prefill_context_parallel_size {asked}"
    for other, size in (
        ("pipeline_parallel_size", mesh.pipeline),
        ("decode_context_parallel_size", mesh.decode_context),
    ):
        if size > 1:
            raise ConfigError(f"{said} does not go with {other} {size} yet; leave one of them out")
    if mesh.expert_parallel:
        raise ConfigError(f"{said} does not go with enable_expert_parallel yet; leave one of them out")
    if (speculator := config.speculation.speculator) is not None:
        raise ConfigError(f"{said} does not go with speculator {speculator!r} yet; leave one of them out")
    _check_blocks(config, said, asked)


def _check_calculated_scales(config: FrameConfig, mesh: Mesh) -> None:
    """Raises `ConfigError` for what does not go with scales that follow from the first request of an engine."""
    if not config.cache.calculate_kv_scales:
        return
    connector, dtype = config.transfer.kv_connector, config.cache.kv_cache_dtype
    against = {
        f"kv_cache_dtype {dtype} has no scales; set it to fp8_e4m3": dtype in ("float32", "float16", "bfloat16"),
        f"KV connector {connector!r} moves blocks to engines with other scales": connector is not None,
        "deterministic needs scales that do not follow from requests": config.model.deterministic,
        f"prefill_context_parallel_size {mesh.prefill_context} divides the tokens that decide": mesh.prefill_context
        > 1,
    }
    if reasons := [reason for reason, applies in against.items() if applies]:
        raise ConfigError(f"calculate_kv_scales: {'; '.join(reasons)}; leave one of them out")


def _check_blocks(config: FrameConfig, said: str, asked: int) -> None:
    """Raises `ConfigError`, which begins with `said`, where `asked` ranks cannot each hold a part of every block."""
    if (size := config.cache.block_size) % asked:
        raise ConfigError(
            f"{said}: blocks of {size} tokens cannot be shared; set block_size to a multiple of {asked}, or to auto"
        )
    if (connector := config.transfer.kv_connector) is not None:
        raise ConfigError(f"{said}: KV connector {connector!r} moves whole tokens of a block; leave one of them out")


def _check_stages(config: FrameConfig, mesh: Mesh, checkpoint: Checkpoint, registry: Registry) -> None:
    """Raises `ConfigError` for what does not go with pipeline stages."""
    layers, asked = config.executor.pipeline_layers, f"pipeline_parallel_size {mesh.pipeline}"
    if mesh.pipeline == 1:
        if layers:
            raise ConfigError(
                f"pipeline_layers {' '.join(map(str, layers))} says what each pipeline stage has, and there is one; "
                f"set pipeline_parallel_size to {len(layers)}, or leave it out"
            )
        return
    if (speculator := config.speculation.speculator) is not None:
        raise ConfigError(f"{asked}: drafts of speculator {speculator!r} need the whole model on each device; use 1")
    if not (model := choose_model(checkpoint, registry)).stage_tensors:
        raise ConfigError(f"{asked}: model {model.__name__} cannot be divided into stages; use 1")


def sketch(
    config: FrameConfig, checkpoint: Checkpoint, registry: Registry, mesh: Mesh, kind: type[Build] = Sketch
) -> tuple[Model, Any]:
    """The model of rank 0 of `mesh` without memory, and the `kind` of build that made it.

    Raises `ValueError` where it cannot be divided like that.
    """
    dtype = getattr(torch, checkpoint.dtype)
    build = kind(
        config=read_model_config(checkpoint, registry),
        dtype=dtype,
        device=torch.device("meta"),
        ops=Ops(),
        groups=unconnected_groups(Placement(mesh=mesh)),
        kv_dtype=dtype,
        device_type="meta",
        max_model_len=1,
        pipeline_layers=config.executor.pipeline_layers,
    )
    model: Model = registry.make("model", model_provider(checkpoint, registry), ModelSetup(build), config)
    return model, build
