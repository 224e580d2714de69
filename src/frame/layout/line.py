"""The line in which an engine says how it divides its model over devices. Knows no weights."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs
from torch import nn

from frame.core.config.checkpoint import Checkpoint
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.mesh import Mesh
from frame.core.layers.experts import experts_of
from frame.core.plugin_host.registry import Registry

from .check import Sketch, sketch

#: Most pipeline stages whose layers are counted one by one.
_MOST_COUNTED = 8


def layout_line(
    config: FrameConfig, mesh: Mesh, checkpoint: Checkpoint, registry: Registry, devices: range | None
) -> str:
    """How the engine is divided, "" where it has one rank and no other engine serves the model.

    `devices` are those of this machine that it takes, None where its workers share one or are elsewhere.
    """
    data, said = config.data_parallel, list[str]()
    if data.data_parallel_size > 1:
        said.append(f"engine {data.data_parallel_rank or 0} of {data.data_parallel_size}")
    if mesh.engine_size > 1:
        said.append(_ranks(mesh))
    if said and (place := _place(config, devices)):
        said[-1] += f" {place}"
    if mesh.size > 1:
        said += _parts(config, mesh, checkpoint, registry)
    return "; ".join(said)


def _ranks(mesh: Mesh) -> str:
    sizes = {"tensor": mesh.tensor, "prefill context": mesh.prefill_context, "pipeline": mesh.pipeline}
    return " × ".join(f"{size} {axis}" for axis, size in sizes.items() if size > 1) + " ranks"


def _place(config: FrameConfig, devices: range | None) -> str:
    nodes = config.executor.nnodes
    if devices is None:
        return f"on {nodes} nodes" if nodes > 1 else ""
    named = f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}–{devices[-1]}"
    return f"on {named} of each of {nodes} nodes" if nodes > 1 else f"on {named}"


def _parts(config: FrameConfig, mesh: Mesh, checkpoint: Checkpoint, registry: Registry) -> list[str]:
    """What each rank has of heads, layers and experts."""
    model, build = sketch(config, checkpoint, registry, structs.replace(mesh, decode_context=1))
    said = []
    if mesh.tensor > 1:
        whole, heads = _heads(sketch(config, checkpoint, registry, Mesh())[1]), _heads(build)
        if whole and heads:
            copies = heads[1] * mesh.tensor // whole[1]
            repeated = f", each on {copies} ranks" if copies > 1 else ""
            said.append(f"{whole[0]} heads → {heads[0]}, KV heads {whole[1]} → {heads[1]} per rank{repeated}")
    if mesh.decode_context > 1:
        said.append(f"{mesh.decode_context} ranks share the KV cache of a request")
    if mesh.prefill_context > 1:
        said.append(f"{mesh.prefill_context} ranks divide the tokens of each step and share the KV cache of a request")
    if mesh.pipeline > 1:
        said.append(f"layers {_counts([len(stage) for stage in build.stages])}")
    return said + _experts(model, mesh)


def _heads(build: Sketch) -> tuple[int, int] | None:
    """(heads, key/value heads) of the first attention layer; None where no layer has any."""
    specs = (layer.backend_spec for layer in build.caches.values())
    return next(((spec.num_heads, spec.num_kv_heads) for spec in specs if spec is not None), None)


def _counts(layers: Sequence[int]) -> str:
    if len(layers) <= _MOST_COUNTED:
        return " + ".join(map(str, layers))
    least, most = min(layers), max(layers)
    return f"{least}{f' to {most}' if most > least else ''} in each stage"


def _experts(model: nn.Module, mesh: Mesh) -> list[str]:
    layers = experts_of(model)
    if not layers:
        return []
    layer = layers[0]
    if layer.count < layer.spec.num_experts:
        return [f"{layer.spec.num_experts} experts → {layer.num_slots} per rank"]
    return [f"{mesh.tensor} parts of each of {layer.spec.num_experts} experts"] if mesh.tensor > 1 else []
