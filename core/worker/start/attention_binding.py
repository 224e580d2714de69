"""Which attention backend serves which layers, and where their caches are. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ...config.tree import FrameConfig
from ...interfaces.attention import AttentionBackend, AttentionSpec
from ...interfaces.connector import CacheView
from ...interfaces.kv import KVLayout
from ...interfaces.setup import BackendSetup
from ...interfaces.step import PrefixCosts
from ...layers.cached import CachedLayer
from ...ops import Ops
from ...plugin_host.registry import Registry
from .kv_memory import KVMemory
from .model_loading import LoadedModel


@dataclass(frozen=True)
class BoundLayers:
    """One backend for each KV group, then one for each spec of the layers without a cache; their names and layers.

    `not_deterministic` says why one of them cannot give equal bits in any batch; "" when all can.
    """

    backends: list[AttentionBackend]
    names: list[str]
    layers: list[list[CachedLayer]]
    not_deterministic: str = ""

    @property
    def prefix_tile_rows(self) -> int:
        """How many rows may read a prefix that they share together; 0 where backends have none, or differ in it."""
        sizes = {backend.prefix_tile_rows for backend in self.backends if backend.shares_prefixes}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def prefix_costs(self) -> PrefixCosts | None:
        """What the first backend that says so gains where rows share a prefix."""
        return next((backend.prefix_costs for backend in self.backends if backend.prefix_costs is not None), None)

    def bind(self, memory: KVMemory) -> dict[str, CacheView]:
        """Gives every layer its backend and its cache; returns the caches by layer."""
        views: dict[str, CacheView] = {}
        for index, (backend, layers) in enumerate(zip(self.backends, self.layers, strict=True)):
            for layer in layers:
                kept = layer.kv_spec() is not None
                cache, block = memory.layer_block(layer.name, type(backend), backend.spec) if kept else (None, None)
                layer.bind(cache, block, index, layer.planner(backend))
                if cache is not None and block is not None:
                    views[layer.name] = CacheView(cache, block, index)
        return views


def choose_backends(
    layout: KVLayout, loaded: LoadedModel, ops: Ops, config: FrameConfig, registry: Registry
) -> BoundLayers:
    """Builds the backends of a model; raises with each candidate's reasons."""
    made = loaded.build.caches
    groups = [[made[layer] for layer in group.layers] for group in layout.groups]
    cacheless = [layer for layer in made.values() if layer.kv_spec() is None]
    specs = {layer.backend_spec: 0 for layer in cacheless}
    groups += [[layer for layer in cacheless if layer.backend_spec == spec] for spec in specs]
    backends, names, not_deterministic = list[AttentionBackend](), list[str](), ""
    for layers in groups:
        spec = layers[0].backend_spec
        if spec is None:
            raise ValueError(
                f"layer {layers[0].name!r} names no backend_spec, and layers without one are not served yet"
            )
        provider = registry.select(
            "attention", config.attention.attention_backend, partial(_against, spec=spec), partial(_rank, spec=spec)
        )
        if reason := registry.resolve(provider).supports(replace(spec, deterministic=True)):
            not_deterministic = f"attention backend {provider.name!r}: {reason}"
        backends.append(registry.make("attention", provider, BackendSetup(spec, ops), config))
        names.append(provider.name)
    return BoundLayers(backends, names, groups, not_deterministic)


def _against(backend: type[AttentionBackend], spec: AttentionSpec) -> str | None:
    return backend.supports(spec)


def _rank(backend: type[AttentionBackend], spec: AttentionSpec) -> int | None:
    return backend.preference(spec)
