"""Steps of every kind, tried on a KV cache of two blocks before the real one exists. Knows no request."""

from __future__ import annotations

from dataclasses import replace

from ...interfaces.kv_layout import with_blocks
from ...interfaces.platform import Platform
from ...interfaces.platform_steps import Steps
from ..step.runner import Runner
from .attention_binding import BoundLayers, ChosenBackends, choose_backends
from .distinct_layers import distinct_layers
from .graph_choice import layer_reasons, model_reasons
from .kv_memory import KVMemory
from .model_loading import LoadedModel, build_model, compiled
from .open_device import OpenDevice
from .runner_setup import RunnerSetup
from .warm_up import warm_up


class TrialSteps:
    """A runner of its own, made when it is first used."""

    def __init__(self, opened: OpenDevice, loaded: LoadedModel, chosen: ChosenBackends) -> None:
        self._opened = opened
        self._loaded = loaded
        self._chosen = chosen
        self._made: tuple[Runner, BoundLayers] | None = None

    def run(self) -> None:
        """Runs steps of every kind; they leave out layers that launch what others do."""
        opened, thorough = self._opened, self._made is None  # afterwards every kernel has been met
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
        """Bytes that recorded steps will take."""
        runner, bound = self._make()
        if against_recording(self._opened, self._loaded, bound):
            return 0
        graphs = runner.device.graphs = self._opened.steps.graphs
        return graphs.reserve(runner.run_dummy)

    def _make(self) -> tuple[Runner, BoundLayers]:
        if self._made is None:
            opened, loaded = self._opened, self._loaded
            layout = with_blocks(self._chosen.layout, 0, 2)
            bound = self._chosen.build(layout, opened.platform.ops())
            bound.bind(KVMemory(layout, opened.platform.device))
            setup = RunnerSetup(opened.config, opened.registry, opened.platform, opened.checkpoint)
            steps, connector = Steps(shapes=opened.steps.shapes), opened.connector(layout, None)
            self._made = setup.make(layout, loaded.model, bound, steps, connector, []), bound
        return self._made


def rehearse(opened: OpenDevice, platform: Platform) -> None:
    """Runs steps of every kind on `platform` and a model without weights, in a process that serves nothing."""
    opened = replace(opened, platform=platform, steps=platform.steps())
    model, build = build_model(opened.config, opened.checkpoint, platform, opened.registry)
    model.finish_load()
    loaded = LoadedModel(model.requires_grad_(False).eval(), build, "", 0, 0.0)
    chosen = choose_backends(build.caches, opened.config, opened.registry)
    TrialSteps(opened, compiled(loaded, opened.steps), chosen).run()


def against_recording(opened: OpenDevice, loaded: LoadedModel, bound: BoundLayers) -> list[str]:
    """Why no step is recorded, whatever moves blocks; none when steps may be."""
    pools = opened.checkpoint.pooling is not None
    return model_reasons(loaded.model, pools=pools) + layer_reasons(bound.planned)
