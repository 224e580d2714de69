"""The devices of this machine that an engine's workers take; too few of them are refused before anything is loaded."""

from __future__ import annotations

from msgspec import structs

from frame.core.config.checkpoint import Checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.executor import Executor
from frame.core.interfaces.mesh import Mesh
from frame.core.interfaces.platform import Platform
from frame.core.plugin_host.registry import Registry

from .check import refusal


def check_devices(
    config: FrameConfig, mesh: Mesh, checkpoint: Checkpoint, registry: Registry, executor: type[Executor]
) -> range | None:
    """The indices of the devices that the workers of this machine take; None where they share one, or are elsewhere.

    Raises `ConfigError` for more of them than the platform has, with the sizes that would work.
    """
    platform: type[Platform] = registry.resolve(
        registry.select("platform", config.executor.platform, lambda platform: platform.probe())
    )
    number = platform.num_devices() if executor.takes_local_devices else None
    if number is None:
        return None
    nodes, data = config.executor.nnodes, config.data_parallel
    each, before = mesh.engine_size // nodes, data.data_parallel_rank_local or 0
    taken = range(before * each, (before + 1) * each)
    if taken.stop <= number:
        return taken
    there = f"this machine has {number} ({platform.device_type})"
    if each <= number:
        raise ConfigError(
            f"{before + 1} engines of {each} devices need {taken.stop}, and {there}; data_parallel_size_local can be "
            f"{number // each} at most here"
        )
    where = f" on each of {nodes} nodes" if nodes > 1 else ""
    divided = f" and prefill_context_parallel_size {mesh.prefill_context}" if mesh.prefill_context > 1 else ""
    sizes = _sizes(config, mesh, checkpoint, registry, number * nodes)
    raise ConfigError(
        f"tensor_parallel_size {mesh.tensor} and pipeline_parallel_size {mesh.pipeline}{divided} need "
        f"{each} devices{where}, "
        f"and {there}; sizes that work: {sizes}"
    )


def _sizes(config: FrameConfig, mesh: Mesh, checkpoint: Checkpoint, registry: Registry, number: int) -> str:
    """The divisions, as "tensor × pipeline", that take the most of `number` devices and that the model allows."""
    executor = config.executor.model_copy(update={"pipeline_layers": []})
    config, nodes = config.model_copy(update={"executor": executor}), config.executor.nnodes
    number //= mesh.prefill_context
    for count in range(number - number % nodes, 0, -nodes):
        found = []
        for tensor in (size for size in range(count, 0, -1) if count % size == 0):
            pipeline = count // tensor
            tried = structs.replace(mesh, tensor=tensor, pipeline=pipeline, decode_context=1)
            if (pipeline == 1 or mesh.pipeline > 1) and refusal(config, checkpoint, registry, tried) is None:
                found.append(f"{tensor} × {pipeline}")
        if found:
            return ", ".join(found) + " (tensor × pipeline)"
    return "none"
