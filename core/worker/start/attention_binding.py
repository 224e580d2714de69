"""Which attention backend serves which layers, how large their blocks are, and where their caches lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

import torch

from frame.kv_scales.calculated import NOT_DETERMINISTIC, calculate

from ...config.tree import FrameConfig
from ...interfaces.attention import BlockFormat, CacheBackend
from ...interfaces.connector import CacheView
from ...interfaces.kv import AnyKVSpec, KVLayout, StateKV
from ...interfaces.kv_layout import AUTO_BLOCK_SIZE, part_of, plan_layout, why_not_served, with_checkpoints
from ...interfaces.latent import CacheSpec
from ...interfaces.provider import Provider
from ...interfaces.setup import BackendSetup
from ...interfaces.step import PrefixCosts
from ...layers.cached import CachedLayer, Planner
from ...ops import Ops
from ...plugin_host.registry import Registry
from ..step.encoder import ENCODER_TOKENS, OWN_TOKENS
from .kv_memory import KVMemory


@dataclass(frozen=True)
class PlannedLayers:
    """Layers that share a plan in each step, of KV group number `group` (negative: they have no cache).

    `name` is that of the attention backend, or of the first layer where the layers have no backend.
    """

    planner: Planner
    backend: CacheBackend | None
    name: str
    group: int
    layers: list[CachedLayer]


@dataclass(frozen=True)
class BoundLayers:
    """The layers of a model, grouped by the plan that they share in a step."""

    planned: list[PlannedLayers]

    @property
    def backends(self) -> list[CacheBackend]:
        """The attention backends of the layers that have one."""
        return [one.backend for one in self.planned if one.backend is not None]

    @property
    def prefix_tile_rows(self) -> int:
        """Rows in a tile that reads a shared prefix once; 0 where no backend shares prefixes, or their tiles differ."""
        sizes = {backend.prefix_tile_rows for backend in self.backends if backend.shares_prefixes}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def prefix_costs(self) -> PrefixCosts | None:
        """The costs of reading a shared prefix once, from the first backend that states them."""
        return next((backend.prefix_costs for backend in self.backends if backend.prefix_costs is not None), None)

    def bind(self, memory: KVMemory) -> dict[str, CacheView]:
        """Gives every layer its planner and its cache; returns the caches by layer that connectors can move."""
        views, caches = dict[str, CacheView](), memory.layer_bytes()
        for index, one in enumerate(self.planned):
            for layer in one.layers:
                cache, block = caches.get(layer.name), None
                if cache is not None and memory.layout.groups[one.group].keeps_states:
                    raw = BlockFormat((cache.shape[1],), (0,), torch.uint8)
                    told = layer.cache_parts, layer.cache_runs
                    views[layer.name] = CacheView(cache, raw, one.group, None, 1, *told)
                elif cache is not None and one.backend is not None:
                    cache, block = memory.layer_block(layer.name, type(one.backend), one.backend.spec)
                    if not memory.layout.groups[one.group].keeps_encoded:
                        axis, (first, total) = block.head_axis, layer.kv_heads
                        heads = None if axis is None or not total else (first, first + block.shape[axis])
                        views[layer.name] = CacheView(cache, block, one.group, heads, total)
                layer.bind(cache, block, index, one.planner)
        return views


@dataclass(frozen=True)
class ChosenBackends:
    """The provider chosen for each spec of the layers, and a layout that all of them accept, still without blocks.

    `layers` are those of this pipeline stage; providers, specs and layout are of all stages. `not_deterministic` says
    why one of them cannot give equal bits in any batch; "" when all can.
    """

    layers: Mapping[str, CachedLayer]
    providers: Mapping[CacheSpec, Provider]
    kv_specs: dict[str, AnyKVSpec]
    block_multiples: dict[str, int]
    layout: KVLayout
    not_deterministic: str
    config: FrameConfig
    registry: Registry

    @property
    def own_part(self) -> KVLayout:
        """The layout with the layers of this pipeline stage alone, which are those that take memory here."""
        return part_of(self.layout, self.layers)

    def build(self, layout: KVLayout, ops: Ops) -> BoundLayers:
        """One backend for each group and spec, then one for each spec of the layers without a cache.

        Layers without a spec plan for themselves, those of one class and KV spec together.
        """
        group_of = {layer: index for index, group in enumerate(layout.groups) for layer in group.layers}
        shared: dict[tuple[int, object], list[CachedLayer]] = {}
        kept = [name for name in group_of if name in self.layers]
        for name in (*kept, *(name for name in self.layers if name not in group_of)):
            layer = self.layers[name]
            asks = layer.backend_spec or (type(layer), layer.kv_spec())
            cacheless = ENCODER_TOKENS if layer.of_encoder else OWN_TOKENS
            shared.setdefault((group_of.get(name, cacheless), asks), []).append(layer)
        planned = []
        for (group, _), layers in shared.items():
            first = layers[0]
            if first.backend_spec is None:
                planned.append(PlannedLayers(first.planner(None), None, first.name, group, layers))
                continue
            size = layout.groups[group].block_size if group >= 0 else AUTO_BLOCK_SIZE
            provider, asked = self.providers[first.backend_spec], first.backend_spec
            spec = replace(asked, block_size=size // asked.context.ranks)
            if reason := self.registry.resolve(provider).supports(spec):
                raise ValueError(
                    f"attention backend {provider.name!r} cannot serve blocks of {size} tokens, with which all blocks "
                    f"of the KV cache are about equally large: {reason}; choose another backend"
                )
            backend: CacheBackend = self.registry.make("attention", provider, BackendSetup(spec, ops), self.config)
            planned.append(PlannedLayers(first.planner(backend), backend, provider.name, group, layers))
        return BoundLayers(planned)


def _refuses(backend: type[CacheBackend], spec: CacheSpec, block_size: int) -> str | None:
    """Why `backend` cannot serve `spec`; empty where it is for layers of another kind."""
    return why_not_served(backend, spec, block_size) if isinstance(spec, backend.spec_type) else ""


def choose_backends(
    layers: Mapping[str, CachedLayer],
    config: FrameConfig,
    registry: Registry,
    own: Mapping[str, CachedLayer] | None = None,
) -> ChosenBackends:
    """Chooses what serves a model's layers; raises with each candidate's reasons.

    `own` are those of this pipeline stage, where others have the rest.
    """
    providers: dict[CacheSpec, Provider] = {}
    multiples: dict[CacheSpec, int] = {}
    size, not_deterministic = config.cache.block_size, ""
    specs = list(dict.fromkeys(spec for layer in layers.values() if (spec := layer.backend_spec) is not None))
    for spec in specs:
        name, ranks = _named(config, registry, spec, specs), methodcaller("preference", spec)
        refuses = partial(_refuses if name == "auto" else why_not_served, spec=spec, block_size=size)
        provider = registry.select("attention", name, refuses, ranks)
        chosen: type[CacheBackend] = registry.resolve(provider)
        providers[spec], multiples[spec] = provider, chosen.block_multiple(spec) * spec.context.ranks
        if reason := why_not_served(chosen, replace(spec, deterministic=True), size):
            not_deterministic = f"attention backend {provider.name!r}: {reason}"
    if config.cache.calculate_kv_scales:
        calculate(layers.values())
        not_deterministic = NOT_DETERMINISTIC
    kept = {name: kv_spec for name, layer in layers.items() if (kv_spec := layer.kv_spec()) is not None}
    for name, kv_spec in kept.items():
        if isinstance(kv_spec, StateKV):
            not_deterministic = f"layer {name!r} keeps a running state, whose bits depend on how a prompt is divided"
            break
    of_layers = {name: multiples[spec] for name in kept if (spec := layers[name].backend_spec) is not None}
    layout = plan_layout(kept, size, of_layers)
    if config.cache.enable_prefix_caching:
        layout = with_checkpoints(layout)
    return ChosenBackends(
        layers if own is None else own, providers, kept, of_layers, layout, not_deterministic, config, registry
    )


def _named(config: FrameConfig, registry: Registry, spec: CacheSpec, specs: Sequence[CacheSpec]) -> str:
    """The backend that the user names, where it is of the kind that `spec` asks for, or of none of `specs`."""
    name = config.attention.attention_backend
    if name == "auto":
        return name
    kind = registry.resolve(registry.choose("attention", name)).spec_type
    return name if isinstance(spec, kind) or not any(isinstance(one, kind) for one in specs) else "auto"
