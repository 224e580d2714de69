"""The worker: one device from start-up to shutdown.

Owns the platform, the model, the KV memory and the runner. Knows no scheduling and no text.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from msgspec import structs

from ..config.checkpoint import Checkpoint, read_checkpoint
from ..config.tree import FrameConfig
from ..config.weight_source import require_same_model, with_weights
from ..interfaces.attention import AttentionBackend
from ..interfaces.connector import ConnectorWorker, NullConnectorWorker
from ..interfaces.executor import StepHandle
from ..interfaces.kv import KVLayout
from ..interfaces.kv_layout import full_bytes, group_layers, plan_layout, with_blocks
from ..interfaces.loader import WeightLoader
from ..interfaces.mesh import Placement
from ..interfaces.model import Model
from ..interfaces.platform import EagerGraphs, Platform, PlatformSpec, Steps
from ..interfaces.setup import ConnectorWorkerSetup
from ..interfaces.step import StepPlan
from ..layers.weights import WeightMap, load_weights
from ..plugin_host.registry import Registry
from ..plugin_host.setups import connector_worker_setup, mesh_of, platform_setup
from .pooling.pooling import Pooling
from .profiler import Profiler
from .sample.processors import load_processors
from .start.attention_binding import BoundLayers, bind_layers
from .start.distinct_layers import distinct_layers
from .start.graph_choice import backend_reasons, choose_graphs, hook_reasons, model_reasons
from .start.kv_memory import KVMemory
from .start.model_loading import LoadedModel, build_model, choose_loader, load_model, resolve_dtype
from .start.numerics import block_numerics
from .start.profile import profile_step
from .start.runner_setup import RunnerSetup
from .start.warm_up import warm_up
from .step.runner import Runner

logger = logging.getLogger("frame.worker")


def choose_platform(config: FrameConfig, registry: Registry, max_model_len: int, placement: Placement) -> Platform:
    """The platform asked for, or the preferred one that this machine has; raises with every candidate's reason."""
    provider = registry.select("platform", config.executor.platform, lambda platform: platform.probe())
    platform: Platform = registry.make("platform", provider, platform_setup(config, max_model_len, placement), config)
    return platform


class Worker:
    """Implements `frame.interfaces.WorkerProtocol`. `facts` (after `start`) describe what was chosen."""

    def __init__(
        self,
        config: FrameConfig,
        registry: Registry,
        rank: int = 0,
        progress: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.config = config
        self.registry = registry
        self._placement = Placement(rank=rank, local_rank=rank, mesh=mesh_of(config))
        self.facts: dict[str, Any] = {}
        self.stages: list[tuple[str, float]] = []
        self._progress = progress
        self._weights_gone = False
        self._profiler = Profiler(config.observability.profile_dir)

    def start(self) -> KVLayout:
        """Initialises the device, loads the model, sizes and allocates the KV cache."""
        checkpoint = self._checkpoint = read_checkpoint(self.config)
        platform = self._timed("device", lambda: self._start_platform(checkpoint))
        self._setup = RunnerSetup(self.config, self.registry, platform, checkpoint)
        self._steps.kernels.compile_ahead(partial(self._rehearse, checkpoint))
        before = platform.memory().snapshot()
        loaded = self._timed("weights", lambda: load_model(self.config, checkpoint, platform, self.registry))
        self.model: Model | None = loaded.model
        platform.memory().claim("weights", list(loaded.model.parameters()))
        loaded = self._compiled(loaded)
        layout: KVLayout = self._timed("kernels", lambda: self._start_kernels(checkpoint, loaded))
        layout = self._timed("kv cache", lambda: self._start_cache(checkpoint, platform, loaded, before, layout))
        self._timed("warm up", self._warm_up)
        logger.info("started: %s", ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.stages))
        return layout

    def execute(self, plan: StepPlan) -> None:
        self.runner.execute(plan)

    def sample(self, masks: bytes = b"") -> StepHandle:
        return self.runner.sample(masks)

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Calls a public method of the worker by name: profiling, sleep, facts, and `collective_rpc`."""
        if timeout is not None:
            raise ValueError(
                f"{method} cannot be bounded to {timeout:g} seconds: the worker runs in the thread that calls it; "
                "leave timeout out, or use executor 'process'"
            )
        target = getattr(self, method, None)
        if method.startswith("_") or not callable(target):
            known = ", ".join(sorted(name for name in vars(type(self)) if not name.startswith("_")))
            raise ValueError(f"no worker method {method!r}; there are: {known}")
        return target(**(arguments or {}))

    def describe(self) -> dict[str, Any]:
        """What was chosen at start-up: platform, attention backends, dtype; and stages (name, seconds)."""
        return {**self.facts, "stages": self.stages}

    def handshake(self) -> bytes:
        """What the KV connector's worker side tells its scheduler side."""
        return self.runner.connector.handshake()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Calls `function(worker, *args)`; only possible where the worker shares the caller's process."""
        return function(self, *args)

    def start_profile(self) -> None:
        """Begins a profiler trace."""
        self._profiler.start()

    def stop_profile(self) -> str:
        """Ends the trace; returns the file it went to."""
        return self._profiler.stop()

    def sleep(self, keep: tuple[str, ...] = ("weights",)) -> None:
        """Frees device memory; raises where the platform cannot. Weights that are not kept are read again later."""
        self.platform.memory().sleep(tuple(keep))
        self._weights_gone = "weights" not in keep

    def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Brings the memory back."""
        self.platform.memory().wake(tuple(tags))
        if "weights" in tags and self._weights_gone and self.model is not None:
            fresh = load_model(self.config, read_checkpoint(self.config), self.platform, self.registry).model
            for old, new in zip(self.model.parameters(), fresh.parameters(), strict=True):
                old.copy_(new)
            self._weights_gone = False
        self._drop_stale_recordings()

    def check_weights(self, **source: Any) -> None:
        """Raises with the reason why `update_weights` would fail; changes nothing."""
        model, (_, loader) = self._awake_model(), self._open_weights(source)
        if any(getattr(module, "kv_scales", None) is not None for module in model.modules()):
            raise RuntimeError("the scales of its 8-bit KV cache belong to recorded steps and cannot change")
        WeightMap(model).plan(loader.tensors(), loader.complete)

    def update_weights(self, **source: Any) -> None:
        """Reads the weights that `source` names (see `with_weights`; {}: those served) into the model's own memory."""
        model, (config, loader) = self._awake_model(), self._open_weights(source)
        streams = self.platform.streams()
        streams.synchronize()
        load_weights(model, loader, streams.fill)
        self._drop_stale_recordings()
        self.config = config

    def _awake_model(self) -> Model:
        if self.model is None or self._weights_gone:
            raise RuntimeError("the engine sleeps without its weights; wake it up first")
        return self.model

    def _open_weights(self, source: dict[str, Any]) -> tuple[FrameConfig, WeightLoader]:
        config = with_weights(self.config, **source)
        checkpoint = read_checkpoint(config)
        require_same_model(self._checkpoint, checkpoint)
        return config, choose_loader(config, checkpoint, self.registry)

    def check(self) -> None:
        """A worker in this process is as alive as its caller."""

    def close(self) -> None:
        """Drops model, cache, runner and what is recorded of them, so that their memory returns within the process."""
        if getattr(self, "runner", None) is not None:
            self.runner.connector.close()
        for name in ("runner", "model", "memory", "platform", "_steps", "_setup"):
            setattr(self, name, None)
        gc.collect()

    def _timed(self, stage: str, work: Callable[[], Any]) -> Any:
        self._progress(stage)
        start = time.perf_counter()
        value = work()
        self.stages.append((stage, time.perf_counter() - start))
        return value

    def _start_platform(self, checkpoint: Checkpoint) -> Platform:
        platform = choose_platform(self.config, self.registry, checkpoint.max_model_len, self._placement)
        dtype = resolve_dtype(self.config, checkpoint, platform)
        sizes = self.config.executor
        reason = platform.supports(
            PlatformSpec(
                dtype=dtype,
                world_size=sizes.tensor_parallel_size * sizes.pipeline_parallel_size,
                deterministic=self.config.model.deterministic,
            )
        )
        if reason:
            raise ValueError(f"platform {platform.device_type!r} cannot serve this configuration: {reason}")
        torch.manual_seed(self.config.model.seed)
        self.platform, self._steps = platform, platform.steps()
        refused = platform.supports(PlatformSpec(dtype, deterministic=True))
        self.facts["not_deterministic"] = f"platform {platform.device_type!r}: {refused}" if refused else ""
        self.facts.update(platform=platform.device_type, dtype=str(dtype).removeprefix("torch."))
        return platform

    def _rehearse(self, checkpoint: Checkpoint, platform: Platform) -> None:
        """Runs steps of every kind on `platform`, in a process that serves nothing."""
        worker = Worker(self.config, self.registry, self._placement.rank)
        worker.platform, worker._steps, worker.facts = platform, platform.steps(), dict(self.facts)
        worker._checkpoint, worker._setup = checkpoint, RunnerSetup(self.config, self.registry, platform, checkpoint)
        model, build = build_model(self.config, checkpoint, platform, self.registry)
        model.finish_load()
        loaded = worker._compiled(LoadedModel(model.requires_grad_(False).eval(), build, 0, 0.0))
        worker._run_spare([], checkpoint, worker._plan_layout(loaded), loaded)

    def _compiled(self, loaded: LoadedModel) -> LoadedModel:
        return replace(loaded, model=self._steps.compiler.prepare(loaded.model, self._steps.shapes))

    def _plan_layout(self, loaded: LoadedModel) -> KVLayout:
        specs = {name: layer.kv_spec() for name, layer in loaded.build.caches.items()}
        kept = {name: spec for name, spec in specs.items() if spec is not None}
        return plan_layout(group_layers(kept, self.config.cache.block_size))

    def _start_kernels(self, checkpoint: Checkpoint, loaded: LoadedModel) -> KVLayout:
        layout, made = self._plan_layout(loaded), list[Runner]()
        self._steps.kernels.prepare(partial(self._run_spare, made, checkpoint, layout, loaded))
        sized = self.config.cache.kv_cache_memory_bytes or self.config.cache.num_gpu_blocks_override
        eager = isinstance(self._steps.graphs, EagerGraphs)
        self._reserved = 0 if sized or eager else self._reserve(made, layout, loaded)
        return layout

    def _reserve(self, made: list[Runner], layout: KVLayout, loaded: LoadedModel) -> int:
        """Bytes that recorded steps will take, tried on the spare runner."""
        spare = made[0] if made else self._make_spare(layout, loaded)
        if self._against(spare.backends, loaded):
            return 0
        spare.device.graphs = self._steps.graphs
        return self._steps.graphs.reserve(spare.run_dummy)

    def _start_cache(
        self, checkpoint: Checkpoint, platform: Platform, loaded: LoadedModel, before: Any, layout: KVLayout
    ) -> KVLayout:
        cache = self.config.cache
        needed = full_bytes(layout, self.config.scheduler.max_num_seqs, checkpoint.max_model_len)
        if platform.memory().needs_profile:
            profile_step(self.config, checkpoint, loaded, platform)
        available = cache.kv_cache_memory_bytes
        if available is None:
            share = cache.gpu_memory_utilization
            available = platform.memory().kv_bytes(before, share, loaded.weights_bytes, needed) - self._reserved
        layout = with_blocks(layout, available, cache.num_gpu_blocks_override)
        with platform.memory().pool("kv_cache"):
            self.memory = KVMemory(layout, platform.device)
        platform.memory().claim("kv_cache", self.memory.slots)
        bound = self._bind_layers(layout, loaded)
        facts = {
            "architecture": checkpoint.architecture,
            "deterministic": self.config.model.deterministic,
            **{name: self.facts[name] for name in ("platform", "dtype", "attention")},
        }
        numerics = block_numerics(loaded.model, layout, bound.backends[: len(layout.groups)], facts)
        layout = structs.replace(layout, numerics=numerics)
        connector = self._make_connector(layout)
        connector.register(self.memory.layer_bytes())
        hooked = hook_reasons(connector.hooks, self.config.transfer.kv_connector)
        against = self._against(bound.backends, loaded) + hooked
        steps = replace(self._steps, graphs=choose_graphs(self._steps.graphs, against))
        if against and not isinstance(self._steps.graphs, EagerGraphs):
            logger.info("no step is recorded: %s", "; ".join(against))
        processors = load_processors(self.config, self.registry, platform.device)
        self.runner = self._setup.make(layout, loaded.model, bound.backends, steps, connector, processors)
        if isinstance(self.runner.pooling, Pooling):
            self.facts["pooling"] = structs.asdict(self.runner.pooling.facts)
        return layout

    def _run_spare(self, made: list[Runner], checkpoint: Checkpoint, layout: KVLayout, loaded: LoadedModel) -> None:
        """Runs steps of every kind on a runner of its own (`made` keeps it), whose cache has two blocks.

        They leave out layers that launch what others do.
        """
        scheduler = self.config.scheduler
        thorough = not made  # afterwards every kernel has been met
        if not made:
            made.append(self._make_spare(layout, loaded))
        may = not self.facts["not_deterministic"]
        sizes = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, checkpoint.max_model_len
        shares = self.config.attention.shared_prefix_min_tokens > 0 and self.facts["prefix_tile_rows"] > 0
        try:
            with distinct_layers(loaded.model):
                warm_up(made[0], *sizes, deterministic=may, shares_prefixes=shares, thorough=thorough)
        except Exception:
            made.clear()  # its requests are in the middle of a step
            raise

    def _make_spare(self, layout: KVLayout, loaded: LoadedModel) -> Runner:
        tiny = with_blocks(layout, 0, 2)
        self.memory = KVMemory(tiny, self.platform.device)
        backends = self._bind_layers(tiny, loaded).backends
        connector = NullConnectorWorker(self._connector_setup(tiny))
        steps = Steps(shapes=self._steps.shapes)
        return self._setup.make(tiny, loaded.model, backends, steps, connector, [])

    def _against(self, backends: Sequence[AttentionBackend], loaded: LoadedModel) -> list[str]:
        """Why no step is recorded, whatever moves blocks; none when steps may be."""
        pools = self._checkpoint.pooling is not None
        return model_reasons(loaded.model, pools=pools) + backend_reasons(backends, self.facts["attention"])

    def _warm_up(self) -> None:
        """Records what the platform wants recorded before the first request."""
        graphs = self.runner.device.graphs
        while graphs.capture(self.runner.run_dummy):
            pass
        self.facts["records"] = graphs.wanted()
        self._addresses = self.runner.recorded_inputs.addresses()

    def _drop_stale_recordings(self) -> None:
        """What recorded steps read may have moved: then they are made again, when the engine lets them."""
        inputs = self.runner.recorded_inputs
        if (addresses := inputs.addresses()) != self._addresses:
            self._addresses = addresses
            self.runner.device.graphs.drop()
            inputs.forget()

    def _bind_layers(self, layout: KVLayout, loaded: LoadedModel) -> BoundLayers:
        bound = bind_layers(layout, loaded, self.memory, self.platform.ops(), self.config, self.registry)
        if bound.not_deterministic:
            self.facts["not_deterministic"] = bound.not_deterministic
        sizes = {backend.prefix_tile_rows for backend in bound.backends if backend.shares_prefixes}
        self.facts["prefix_tile_rows"] = sizes.pop() if len(sizes) == 1 else 0
        self.facts["attention"] = bound.names
        return bound

    def _make_connector(self, layout: KVLayout) -> ConnectorWorker:
        name = self.config.transfer.kv_connector
        if name is None:
            return NullConnectorWorker(self._connector_setup(layout))
        connector: ConnectorWorker = self.registry.make(
            "connector", name, self._connector_setup(layout), self.config, part="worker"
        )
        return connector

    def _connector_setup(self, layout: KVLayout) -> ConnectorWorkerSetup:
        max_model_len = self._checkpoint.max_model_len
        return connector_worker_setup(self.config, max_model_len, layout, self._placement, self.platform)
