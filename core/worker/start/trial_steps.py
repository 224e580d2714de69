"""Steps of every kind, run on a KV cache of two blocks before the real one is allocated."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from ...interfaces.kv_layout import part_of, with_blocks
from ...interfaces.model import Model
from ...interfaces.platform import Platform
from ...interfaces.platform_steps import Steps
from ...interfaces.wire import decode, encode
from ...layers.cached import CachedLayer
from ...layers.experts import exchanges_of
from ...layers.stages import Layers
from ...parallel.groups import gather_all, make_groups, unconnected_groups
from ..step.runner import Runner
from .attention_binding import BoundLayers, ChosenBackends, choose_backends
from .kv_memory import KVMemory
from .model_loading import LoadedModel, build_model, compiled, make_maps
from .open_device import OpenDevice
from .runner_setup import make_runner
from .warm_up import warm_up


class TrialSteps:
    """Runs trial steps on a runner and a KV cache of their own, which are made at the first call."""

    def __init__(self, opened: OpenDevice, loaded: LoadedModel, chosen: ChosenBackends) -> None:
        self._opened = opened
        self._loaded = loaded
        self._chosen = chosen
        self._made: tuple[Runner, BoundLayers] | None = None
        self._begun = False

    def run(self, *, brief: bool = False) -> None:
        """Runs steps of every kind, on a model without the layers that launch the same kernels as others.

        Only the first run is thorough, as every kernel has been met then. Where it broke off the next one is, too, but
        for workers that others wait for in collectives: those run no more steps than the others.
        """
        opened, first = self._opened, not self._begun
        thorough = not brief and (first or (self._made is None and opened.placement.mesh.size == 1))
        self._begun = True
        runner, bound = self._make()
        scheduler = opened.config.scheduler
        sizes = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, opened.checkpoint.max_model_len
        shares = opened.config.attention.shared_prefix_min_tokens != 0 and bound.prefix_tile_rows > 0
        may = not (opened.not_deterministic or self._chosen.not_deterministic)
        try:
            with distinct_layers(self._loaded.model):
                warm_up(runner, *sizes, deterministic=may, shares_prefixes=shares, thorough=thorough)
        except Exception:
            self._made = None  # its requests are in the middle of a step
            raise

    def reserve(self) -> int:
        """Bytes that captured steps will take."""
        runner, bound = self._make()
        if shared_reasons(self._opened, against_capture(self._opened, self._loaded, bound)):
            return 0
        graphs = runner.device.graphs = self._opened.steps.graphs
        return graphs.reserve(runner.run_dummy)

    def _make(self) -> tuple[Runner, BoundLayers]:
        if self._made is None:
            opened, loaded = self._opened, self._loaded
            layout = with_blocks(self._chosen.layout, 0, 2)
            bound = self._chosen.build(layout, opened.platform.ops())
            bound.bind(KVMemory(part_of(layout, self._chosen.layers), opened.platform.device))
            steps, connector = Steps(shapes=opened.steps.shapes), opened.connector(layout, None)
            # stages run these steps alone: what they hand on is as good as nothing
            alone = replace(opened, groups=unconnected_groups(opened.placement))
            self._made = (
                make_runner(
                    alone, layout, loaded.model, bound, steps, connector, adapters=loaded.build.methods.adapters
                ),
                bound,
            )
        return self._made


def rehearse(opened: OpenDevice, platform: Platform) -> None:
    """Runs steps of every kind on `platform` and a model without weights, in a process that serves nothing."""
    opened = replace(opened, platform=platform, steps=platform.steps())
    groups = make_groups(opened.placement, platform.unconnected_collectives(opened.placement))
    model, build = build_model(opened.config, opened.checkpoint, platform, opened.registry, groups)
    model.finish_load()
    make_maps(model, platform)
    loaded = LoadedModel(model.requires_grad_(False).eval(), build, "", 0)
    chosen = choose_backends(build.caches, opened.config, opened.registry, build.own_caches)
    TrialSteps(opened, compiled(loaded, opened.steps), chosen).run()


def against_capture(opened: OpenDevice, loaded: LoadedModel, bound: BoundLayers) -> list[str]:
    """Why this worker captures no step; empty when it may. KV connectors may add reasons of their own."""
    model, found = loaded.model, list[str]()
    if opened.checkpoint.pooling is not None:
        found.append("a pooling engine has no decodes")
    if model.needs_python or model.segments:
        found.append(f"model {type(model).__name__} needs Python in each step")
    exchanges = {type(one) for one in exchanges_of(model) if one.needs_python}
    found += [f"expert exchange {kind.__name__} needs Python in each step" for kind in exchanges]
    python = dict.fromkeys((one.backend is None, one.name) for one in bound.planned if one.planner.needs_python)
    found += [f"{'layer' if own else 'attention backend'} {name!r} needs Python in each step" for own, name in python]
    return found


def shared_reasons(opened: OpenDevice, own: list[str]) -> list[str]:
    """The reasons of all workers, who call this at once, so that none waits in a capture for one that makes none.

    A reason that not all have names the ranks that do.
    """
    ranks: dict[str, list[int]] = {}
    given = [decode(one, list[str]) for one in gather_all(opened.groups, encode(own))]
    for rank, reasons in enumerate(given):
        for reason in dict.fromkeys(reasons):
            ranks.setdefault(reason, []).append(rank)
    return [
        reason if len(whose) == len(given) else f"{reason} (worker {', '.join(map(str, whose))})"
        for reason, whose in ranks.items()
    ]


@contextmanager
def distinct_layers(model: Model) -> Iterator[None]:
    """Within the context, `model` lacks the layers whose kernels earlier layers launch, too.

    A layer is left out when an earlier pair of neighbours was made like it and the layer before it. The last layer
    stays. Only lists made by `build.layers` are cut; attention layers left out keep their places in the cache.
    """
    whole = [
        (module, name, layers)
        for module in list(model.modules())
        for name, layers in module.named_children()
        if isinstance(layers, Layers)
    ]
    for module, name, layers in whole:
        setattr(module, name, Layers(_distinct(layers)))
    try:
        yield
    finally:
        for module, name, layers in whole:
            setattr(module, name, layers)


def _distinct(layers: nn.ModuleList) -> list[nn.Module]:
    kept: list[nn.Module] = []
    seen: set[tuple[Hashable, Hashable]] = set()
    before: Hashable = None
    for index, layer in enumerate(layers):
        made = _made(layer)
        if (before, made) not in seen or index == len(layers) - 1:
            kept.append(layer)
        seen.add((before, made))
        before = made
    return kept


def _made(layer: nn.Module) -> Hashable:
    """What a layer's launches depend on: its modules, its tensors' shapes, its attention."""
    kinds = tuple((name, type(module)) for name, module in layer.named_modules())
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    specs = tuple(
        (module.backend_spec, module.kv_spec()) for module in layer.modules() if isinstance(module, CachedLayer)
    )
    return kinds, shapes, specs
