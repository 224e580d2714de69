"""Which attention backend serves which layers, and where their caches are. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from ...config.tree import FrameConfig
from ...interfaces.attention import AttentionBackend, AttentionSpec
from ...interfaces.kv import KVLayout
from ...interfaces.setup import BackendSetup
from ...ops import Ops
from ...plugin_host.registry import Registry
from .kv_memory import KVMemory
from .model_loading import LoadedModel


@dataclass
class BoundLayers:
    """One backend for each KV group, then one for each spec of the layers without a cache; and their names.

    `not_deterministic` says why one of them cannot give equal bits in any batch; "" when all can.
    """

    backends: list[AttentionBackend] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    not_deterministic: str = ""


def bind_layers(
    layout: KVLayout, loaded: LoadedModel, memory: KVMemory, ops: Ops, config: FrameConfig, registry: Registry
) -> BoundLayers:
    """Chooses the backends and gives every layer its own and its cache. Raises with each candidate's reasons."""
    bound = BoundLayers()
    made = loaded.build.caches
    groups = [[made[layer] for layer in group.layers] for group in layout.groups]
    cacheless = [layer for layer in made.values() if layer.kv_spec() is None]
    specs = {layer.backend_spec: 0 for layer in cacheless}
    groups += [[layer for layer in cacheless if layer.backend_spec == spec] for spec in specs]
    for index, layers in enumerate(groups):
        spec = layers[0].backend_spec
        if spec is None:
            raise ValueError(
                f"layer {layers[0].name!r} names no backend_spec, and layers without one are not served yet"
            )
        provider = registry.select(
            "attention", config.attention.attention_backend, partial(_against, spec=spec), partial(_rank, spec=spec)
        )
        kind = registry.resolve(provider)
        backend = registry.make("attention", provider, BackendSetup(spec, ops), config)
        for layer in layers:
            kept = layer.kv_spec() is not None
            cache, block = memory.layer_block(layer.name, kind, spec) if kept else (None, None)
            layer.bind(cache, block, index, layer.planner(backend))
        if reason := kind.supports(replace(spec, deterministic=True)):
            bound.not_deterministic = f"attention backend {provider.name!r}: {reason}"
        bound.backends.append(backend)
        bound.names.append(provider.name)
    return bound


def _against(backend: type[AttentionBackend], spec: AttentionSpec) -> str | None:
    return backend.supports(spec)


def _rank(backend: type[AttentionBackend], spec: AttentionSpec) -> int | None:
    return backend.preference(spec)
