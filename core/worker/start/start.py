"""The start of a worker in two phases, between which the engine plans the KV cache. Nothing here runs afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from frame.expert_balance.null import NoBalance
from frame.expert_balance.start import make_balance
from frame.kept_weights.holder import NoHolder
from frame.kept_weights.start import weight_holder
from frame.kv_scales.calculated import FirstSteps
from frame.transfers.device_bytes import device_bytes

from ...config.tree import FrameConfig
from ...interfaces.collectives import Collectives, Groups, NoCollectives
from ...interfaces.connector import CacheView
from ...interfaces.executor import WorkerDescription, WorkerFacts, WorkerReady
from ...interfaces.kv import KVLayout
from ...interfaces.kv_layout import full_bytes, part_of, pool_bytes
from ...interfaces.mesh import Placement
from ...interfaces.model import Model
from ...interfaces.platform import MemorySnapshot
from ...interfaces.platform_steps import EagerGraphs
from ...parallel.groups import gather_all
from ...plugin_host.registry import Registry
from ..pooling.pooling import Pooling
from ..sample.processors import load_processors
from ..step.runner import Runner
from .attention_binding import BoundLayers, ChosenBackends, choose_backends
from .kv_memory import KVMemory
from .model_loading import LoadedModel, compiled, load_model, room_before
from .numerics import block_numerics
from .open_device import OpenDevice, open_device
from .profile import profile_step
from .runner_setup import embed_size, make_runner
from .trial_steps import TrialSteps, against_capture, rehearse, shared_reasons

logger = logging.getLogger("frame.worker")

T = TypeVar("T")


@dataclass(frozen=True)
class Started:
    """The parts of a worker that serves; `model` is the one that weights are loaded into."""

    opened: OpenDevice
    described: WorkerDescription
    model: Model
    memory: KVMemory
    views: Mapping[str, CacheView]
    runner: Runner
    stages: list[tuple[str, float]]


@dataclass(frozen=True)
class _Loaded:
    """What `WorkerStart.load` made and `WorkerStart.allocate` continues with."""

    opened: OpenDevice
    weights: Model
    model: LoadedModel
    chosen: ChosenBackends
    described: WorkerDescription
    balance: NoBalance


class WorkerStart:
    """`load`, then `allocate`. `progress` is called with the name of each stage when it begins."""

    def __init__(
        self,
        config: FrameConfig,
        registry: Registry,
        placement: Placement,
        engine_id: str,
        progress: Callable[[str], None],
    ) -> None:
        self._open = partial(open_device, config, registry, placement, engine_id)
        self._progress = progress
        self._stages: list[tuple[str, float]] = []
        self._loaded: _Loaded | None = None
        self.collectives: Collectives = NoCollectives()
        self.holder = NoHolder()  # of the weights

    def load(self) -> WorkerFacts:
        """Opens the device and loads the model."""
        opened = self._timed("device", self._open)
        opened.steps.kernels.compile_ahead(partial(rehearse, opened))
        opened = self._timed("rendezvous", opened.connected) if opened.placement.mesh.size > 1 else opened
        self.collectives = opened.collectives
        memory, config = opened.platform.memory(), opened.config
        self.holder = weight_holder(config, opened.checkpoint.folder, opened.platform, opened.placement)
        before = room_before(config, memory)
        parts = config, opened.checkpoint, opened.platform, opened.registry, opened.groups
        loaded = self._timed("weights", lambda: load_model(*parts, before, self.holder))
        weights = loaded.model
        num_embedded = embed_size(opened, weights)
        memory.claim("weights", list(weights.parameters()))
        balance = make_balance(opened, weights, loaded.maps)
        loaded = compiled(loaded, opened.steps)
        chosen = choose_backends(loaded.build.caches, config, opened.registry, loaded.build.own_caches)
        kv_bytes = self._prepared_bytes(opened, loaded, chosen, before)
        bound = chosen.build(chosen.layout, opened.platform.ops())
        described = WorkerDescription(
            platform=opened.platform.device_type,
            dtype=opened.dtype,
            attention=[one.name for one in bound.planned if one.backend is not None],
            not_deterministic=chosen.not_deterministic or opened.not_deterministic,
            prefix_tile_rows=bound.prefix_tile_rows,
            prefix_costs=bound.prefix_costs,
            embed_size=num_embedded,
        )
        self._loaded = _Loaded(opened, weights, loaded, chosen, described, balance)
        return WorkerFacts(
            kv_specs=chosen.kv_specs,
            kv_bytes=kv_bytes,
            pool_bytes=pool_bytes(chosen.own_part),
            block_multiples=chosen.block_multiples,
            digest=_digest(self._loaded, bound),
            model=loaded.digest,
            described=described,
            answers=_answers(opened),
        )

    def allocate(self, layout: KVLayout) -> tuple[Started, WorkerReady]:
        """Allocates the KV cache, then captures the CUDA graphs that the platform wants before the first request."""
        if self._loaded is None:
            raise RuntimeError("a worker allocates its KV cache once, after its weights are loaded")
        loaded, self._loaded = self._loaded, None
        with ExitStack() as undo:
            memory, views, runner = self._timed("kv cache", lambda: _with_cache(loaded, layout, undo))
            self._timed("warm up", lambda: _capture_first(runner, loaded.opened.groups))
            logger.info(
                "%s: %s", _name(loaded.opened), ", ".join(f"{stage} {spent:.2f} s" for stage, spent in self._stages)
            )
            started = Started(loaded.opened, loaded.described, loaded.weights, memory, views, runner, self._stages)
            ready = WorkerReady(
                handshake=runner.connector.handshake(),
                wants_capture=runner.wants_capture,
                stages=self._stages,
                pooling=runner.pooling.facts if isinstance(runner.pooling, Pooling) else None,
            )
            undo.pop_all()
        if loaded.opened.config.cache.calculate_kv_scales:
            FirstSteps(runner.device, loaded.weights.modules())
        return started, ready

    def close(self) -> None:
        """Drops a model that was loaded and got no KV cache, and ends the process groups."""
        self._loaded = None
        self.collectives.close()

    def _prepared_bytes(
        self, opened: OpenDevice, loaded: LoadedModel, chosen: ChosenBackends, before: MemorySnapshot
    ) -> int:
        """Bytes for the KV cache, after kernels are prepared and graphs and the largest step have been tried."""
        config, checkpoint, platform = opened.config, opened.checkpoint, opened.platform
        cache, trial = config.cache, TrialSteps(opened, loaded, chosen)
        self._timed("kernels", partial(opened.steps.kernels.prepare, trial.run))
        sized = cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override
        captures = not (sized or isinstance(opened.steps.graphs, EagerGraphs))
        reserved = self._measured("captures tried", trial.reserve) if captures else 0
        del trial  # and its cache
        if platform.memory().needs_profile:
            self._measured("largest step", lambda: profile_step(config, checkpoint, loaded, platform))
        if cache.kv_cache_memory_bytes is not None:
            return cache.kv_cache_memory_bytes
        sizes = config.scheduler.max_num_seqs, checkpoint.max_model_len
        needed = full_bytes(chosen.layout, *sizes, pool_bytes(chosen.own_part))
        share = cache.gpu_memory_utilization
        if connected := device_bytes(config, opened.registry, platform.device_type):
            connector = config.transfer.kv_connector
            logger.info("%d MiB of the device are for the KV connector %s", connected >> 20, connector)
        return platform.memory().kv_bytes(before, share, loaded.weights_bytes, needed) - reserved - connected

    def _timed(self, stage: str, work: Callable[[], T]) -> T:
        self._progress(stage)
        return self._measured(stage, work)

    def _measured(self, stage: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        value = work()
        self._stages.append((stage, time.perf_counter() - start))
        return value


def _name(opened: OpenDevice) -> str:
    """For the log: "started", of several workers with the rank."""
    rank, size = opened.placement.rank, opened.placement.mesh.size
    return "started" if size == 1 else f"worker {rank} of {size} started"


def _answers(opened: OpenDevice) -> bool:
    """Whether the worker's results count: those of the first tensor rank of the last stage have the tokens.

    With a KV connector, each worker reports its transfers.
    """
    groups = opened.groups
    last = groups.pipeline.rank == groups.pipeline.size - 1
    first = groups.tensor.rank == 0 and groups.prefill_context.rank == 0
    return (last and first) or opened.config.transfer.kv_connector is not None


def _digest(loaded: _Loaded, bound: BoundLayers) -> str:
    """What decides the bits of this worker's blocks, see `block_numerics`."""
    described, opened = loaded.described, loaded.opened
    facts = {
        "architecture": opened.checkpoint.architecture,
        "deterministic": opened.config.model.deterministic,
        "platform": described.platform,
        "dtype": described.dtype,
        "attention": described.attention,
        "layers": list(loaded.chosen.layers),
    }
    if format_ := loaded.model.build.methods.quantization.numerics:
        facts["quantization"] = format_
    return block_numerics(loaded.chosen.layout, bound.backends, facts)


def _with_cache(loaded: _Loaded, layout: KVLayout, undo: ExitStack) -> tuple[KVMemory, Mapping[str, CacheView], Runner]:
    opened = loaded.opened
    config, platform = opened.config, opened.platform
    bound = loaded.chosen.build(layout, platform.ops())
    with platform.memory().pool("kv_cache"):
        memory = KVMemory(part_of(layout, loaded.chosen.layers), platform.device)
    platform.memory().claim("kv_cache", memory.slots)
    views = bound.bind(memory)
    connector = opened.connector(layout, config.transfer.kv_connector)
    undo.callback(connector.close)
    name, moves = config.transfer.kv_connector, connector.moves_states
    kept = [layer.name for one in bound.planned if one.group >= 0 for layer in one.layers]
    moved = [layer for layer, view in views.items() if moves or not layout.groups[view.group].keeps_states]
    if name is not None and (unmoved := [layer for layer in kept if layer not in moved]):
        raise ValueError(f"KV connector {name!r} cannot move what {unmoved[0]!r} keeps; leave it out for this model")
    connector.register(views)
    against = against_capture(opened, loaded.model, bound)
    if connector.hooks.decode_steps:
        against.append(f"KV connector {config.transfer.kv_connector!r} needs Python in each layer of decode steps")
    if not isinstance(opened.steps.graphs, EagerGraphs) and (against := shared_reasons(opened, against)):
        logger.info("no step is captured: %s", "; ".join(against))
    steps = replace(opened.steps, graphs=EagerGraphs()) if against else opened.steps
    processors = load_processors(config, opened.registry, platform.device)
    runner = make_runner(
        opened, layout, loaded.model.model, bound, steps, connector, processors, loaded.model.build.methods.adapters
    )
    if loaded.model.maps is not None:
        loaded.model.maps.loads.zero_()  # of trial steps
    runner.balance = loaded.balance
    runner.stage.connect()
    return memory, views, runner


def _capture_first(runner: Runner, groups: Groups) -> None:
    """Captures what comes before the first request: all there is where nothing is captured later, on all workers."""
    graphs, later = runner.device.graphs, runner.lockstep.captures
    while graphs.capture(runner.run_dummy) or (not later and any(gather_all(groups, b"1" if graphs.wanted() else b""))):
        pass
