"""What each rank of an engine would hold of a model, found by building it without memory as its worker would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from frame.core.config.checkpoint import Checkpoint
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.kv import AnyKVSpec
from frame.core.interfaces.latent import CacheSpec
from frame.core.interfaces.mesh import Placement
from frame.core.interfaces.model import Model
from frame.core.layers.build import Build
from frame.core.layers.embedding import tied_tables
from frame.core.layers.experts import experts_of
from frame.core.layers.stages import Layers
from frame.core.ops import Ops
from frame.core.parallel.groups import unconnected_groups
from frame.core.parallel.rendezvous import placements_of
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import mesh_of
from frame.core.worker.start.model_loading import build_model
from frame.weight_offload.kept import layer_bytes
from frame.weight_offload.settings import WeightOffloadConfig

from .check import check_layout
from .line import layout_line


@dataclass(frozen=True)
class RankPart:
    """What one rank holds; `rank` counts the ranks of its engine.

    `layers` are those of its pipeline stage, the last of which has the head. `weights_bytes` are those of its
    parameters, `layer_bytes` those of each of its layers that host memory may keep, `num_experts` whole experts of
    each layer that has any. `tied` are the shapes of tables that an embedding and a head share. `kv_specs` are what all
    layers of the model keep, each with this rank's heads, and `own` the names of those that keep it here; `attention`
    is what layers ask of their backends.
    """

    rank: int
    layers: range
    is_last: bool
    weights_bytes: int
    layer_bytes: tuple[int, ...]
    num_experts: int
    tied: tuple[tuple[int, int], ...]
    kv_specs: Mapping[str, AnyKVSpec]
    own: frozenset[str]
    attention: Mapping[str, CacheSpec]


@dataclass(frozen=True)
class EngineParts:
    """The parts of all ranks of an engine, the first of several, and the line that says how it is divided."""

    ranks: tuple[RankPart, ...]
    line: str


def engine_parts(config: FrameConfig, checkpoint: Checkpoint, dtype: str) -> EngineParts:
    """What each rank would hold with elements of `dtype`, under the settings of `config`.

    Raises `ConfigError` for a division that the model does not allow, with the sizes that it does.
    """
    registry, mesh = Registry.load(), mesh_of(config)
    check_layout(config, mesh, checkpoint, registry)
    parts = []
    for rank, placement in enumerate(placements_of(mesh, "", config.data_parallel)):
        model, build = _without_memory(config, checkpoint, registry, placement, dtype)
        parts.append(_part(rank, model, build))
    alone = config.model_copy(update={"data_parallel": type(config.data_parallel)()})
    return EngineParts(tuple(parts), layout_line(alone, mesh, checkpoint, registry, None))


def _without_memory(
    config: FrameConfig, checkpoint: Checkpoint, registry: Registry, placement: Placement, dtype: str
) -> tuple[Model, Build]:
    config = config.model_copy(update={"weight_offload": WeightOffloadConfig()})  # which changes no layer
    platform: Any = SimpleNamespace(
        device=torch.device("meta"), device_type="meta", ops=Ops, auto_dtype=lambda stored: getattr(torch, dtype)
    )
    return build_model(config, checkpoint, platform, registry, unconnected_groups(placement))


def _part(rank: int, model: Model, build: Build) -> RankPart:
    numbers = [int(name) for one in model.modules() if isinstance(one, Layers) for name, _ in one.named_children()]
    layers = build.caches.items()
    return RankPart(
        rank=rank,
        layers=range(min(numbers), max(numbers) + 1) if numbers else range(0),
        is_last=build.stage.last,
        weights_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        layer_bytes=tuple(layer_bytes(layer) for one in model.modules() if isinstance(one, Layers) for layer in one),
        num_experts=max((layer.count for layer in experts_of(model)), default=0),
        tied=tuple((table.num_rows, table.dim) for table in tied_tables(model)),
        kv_specs={name: spec for name, layer in layers if (spec := layer.kv_spec()) is not None},
        own=frozenset(build.own_caches),
        attention={name: asked for name, layer in layers if (asked := layer.backend_spec) is not None},
    )
