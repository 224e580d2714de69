"""Which divisions a model allows: refused before anything is loaded, with the sizes that would work.

A model says so itself: it is built without memory, for a rank whose peers are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config.checkpoint import Checkpoint
from ..config.errors import ConfigError
from ..config.model_config import ModelConfig
from ..config.tree import FrameConfig
from ..interfaces.mesh import Mesh, Placement
from ..interfaces.setup import ModelSetup
from ..layers.build import Build
from ..layers.stages import Layers
from ..ops import Ops
from ..plugin_host.model_choice import model_provider
from ..plugin_host.registry import Registry
from .groups import unconnected_groups

#: The largest size that is tried when one must be named that works.
MOST_RANKS = 64


class Sketch(Build):
    """Builds few of a model's layers, which stand for the others."""

    def layers(self, count: int, make: Callable[[int], nn.Module]) -> nn.ModuleList:
        """The first, a middle and the last one."""
        return Layers([make(index) for index in dict.fromkeys((0, count // 2, count - 1)) if index >= 0])


def check_layout(config: FrameConfig, mesh: Mesh, checkpoint: Checkpoint, registry: Registry) -> None:
    """Raises `ConfigError` where the model's layers cannot be divided over the ranks of `mesh`."""
    if mesh.pipeline > 1:
        raise ConfigError(
            f"pipeline_parallel_size {mesh.pipeline}: no model runs in stages yet; use 1, and tensor_parallel_size for "
            "several devices"
        )
    if mesh.tensor == 1:
        return

    def why_not(size: int) -> str | None:
        placement = Placement(mesh=Mesh(tensor=size, expert_parallel=mesh.expert_parallel))
        try:
            _sketch(config, placement, checkpoint, registry)
        except ConfigError:
            raise
        except ValueError as error:
            return str(error.__cause__ or error)
        return None

    if reason := why_not(mesh.tensor):
        works = [size for size in range(1, MOST_RANKS + 1) if why_not(size) is None]
        sizes = ", ".join(map(str, works)) or "none"
        raise ConfigError(f"tensor_parallel_size {mesh.tensor}: {reason}; sizes that work: {sizes}")


def _sketch(config: FrameConfig, placement: Placement, checkpoint: Checkpoint, registry: Registry) -> Any:
    dtype = getattr(torch, checkpoint.dtype)
    build = Sketch(
        config=ModelConfig(checkpoint.text),
        dtype=dtype,
        device=torch.device("meta"),
        ops=Ops(),
        groups=unconnected_groups(placement),
        kv_dtype=dtype,
        device_type="meta",
        max_model_len=1,
    )
    return registry.make("model", model_provider(checkpoint, registry), ModelSetup(build), config)
