"""The worker: one device from start-up to shutdown.

Starts in two phases, then passes steps to its runner. Knows no scheduling and no text.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from ..config.checkpoint import read_checkpoint
from ..config.tree import FrameConfig
from ..config.weight_source import require_same_model, with_weights
from ..interfaces.executor import Progress, StepHandle, WorkerFacts, WorkerReady
from ..interfaces.extension import WorkerExtension
from ..interfaces.kv import KVLayout
from ..interfaces.loader import WeightLoader
from ..interfaces.mesh import Placement
from ..interfaces.model import Model
from ..interfaces.platform import Platform
from ..interfaces.setup import LoaderSetup, WorkerExtensionSetup
from ..interfaces.step import StepPlan
from ..layers.experts import exchanges_of
from ..layers.weights import WeightMap, load_weights
from ..plugin_host.registry import Registry
from .profiler import Profiler
from .start.model_loading import choose_loader
from .start.start import Started, WorkerStart

logger = logging.getLogger("frame.worker")


class Worker:
    """Implements `frame.interfaces.WorkerProtocol`. Functions of `collective_rpc` may read its ranks and model."""

    def __init__(
        self,
        config: FrameConfig,
        registry: Registry,
        placement: Placement,
        engine_id: str = "",
        progress: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.config = config
        self.registry = registry
        self.rank, self.local_rank = placement.rank, placement.local_rank
        self._placement = placement
        self._extension: WorkerExtension | None = None
        self._start = WorkerStart(config, registry, placement, engine_id, progress)
        self._started: Started | None = None
        self._step = 0  # the newest one
        self._weights_gone = self._cache_gone = False
        suffix = f"-rank{placement.rank}" if placement.mesh.size > 1 else ""
        self._profiler = Profiler(config.observability.profile_dir, suffix)

    @property
    def started(self) -> Started:
        """The parts that serve; raises `RuntimeError` before `allocate` and after `close`."""
        if self._started is None:
            raise RuntimeError("the worker has not been started, or is closed")
        return self._started

    @property
    def platform(self) -> Platform:
        """The device."""
        return self.started.opened.platform

    @property
    def model(self) -> Model:
        """The model that serves."""
        return self.started.model

    def load(self) -> WorkerFacts:
        return self._start.load()

    def allocate(self, layout: KVLayout) -> WorkerReady:
        self._started, ready = self._start.allocate(layout)
        self.runner = self._started.runner
        self._addresses = self.runner.captured_inputs.addresses()
        self._extension = self._make_extension(self.config.executor.worker_extension)
        return ready

    def progress(self) -> Progress:
        called = self._start.collectives
        return Progress(self._step, called.num_calls, called.num_exchanges)

    def execute(self, plan: StepPlan) -> None:
        called = self._start.collectives
        called.num_calls = called.num_exchanges = 0
        self._step = plan.step
        self.runner.execute(plan)

    def sample(self, masks: bytes = b"") -> StepHandle:
        return self.runner.sample(masks)

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Calls one of `methods` by name: profiling, sleep, facts, and `collective_rpc`."""
        if timeout is not None:
            raise ValueError(
                f"{method} cannot be bounded to {timeout:g} seconds: the worker runs in the thread that calls it; "
                "leave timeout out, or use executor 'process'"
            )
        methods = self.methods
        if method not in methods:
            raise ValueError(f"no worker method {method!r}; there are: {', '.join(sorted(methods))}")
        return methods[method](**(arguments or {}))

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """What can be called by name: the worker's public methods, and those of its extension."""
        names = [name for name, value in vars(type(self)).items() if callable(value) and not name.startswith("_")]
        added = self._extension.methods if self._extension is not None else {}
        return {**added, **{name: getattr(self, name) for name in names}}

    def _make_extension(self, name: str | None) -> WorkerExtension | None:
        """Builds the extension `name`; raises `ValueError` where it has a method that workers have."""
        if name is None:
            return None
        setup = WorkerExtensionSetup(self._placement, self.model, self.platform.device, self.platform.streams())
        made: WorkerExtension = self.registry.make("extension", name, setup, self.config)
        if taken := sorted(made.methods.keys() & self.methods.keys()):
            made.close()
            raise ValueError(f"worker extension {name!r} has {', '.join(taken)}, which workers have: rename it there")
        return made

    def describe(self) -> dict[str, Any]:
        """What was chosen at start-up: platform, attention backends, dtype; and stages (name, seconds)."""
        return {**structs.asdict(self.started.described), "stages": self.started.stages}

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Calls `function(worker, *args)`; only possible where the worker shares the caller's process."""
        return function(self, *args)

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given; raises what it failed with."""
        self.platform.streams().synchronize()

    def start_profile(self) -> None:
        """Begins a profiler trace."""
        self._profiler.start()

    def stop_profile(self) -> str:
        """Ends the trace; returns the file it went to."""
        return self._profiler.stop()

    def end_transfers(self) -> None:
        """Ends the KV connector's access to the cache; raises where some goes on. The worker stays as it is."""
        self.runner.connector.end_access()

    def renew_cache(self) -> bool:
        """Has the KV connector let go of the cache and take it again; returns whether it did, and no load goes on."""
        self._cache_gone = True
        try:
            self.runner.connector.register({})
        except Exception:
            logger.exception("the KV connector keeps its access to the cache")
            return False
        finally:
            self._give_cache()
        return True

    def sleep(self, keep: tuple[str, ...] = ("weights",)) -> None:
        """Frees device memory; raises where the platform cannot. Weights that are not kept are read again later.

        Where it raises, nothing is freed; of what it took away, `wake_up` brings back what could not be put back here.
        """
        self.runner.balance.settle()
        holder, frees = self._start.holder, "weights" not in keep
        if frees:
            holder.hide()
        try:
            if frees:
                self.model.unpack_weights()  # what is packed has no storage to free
            self._cache_gone = True  # also where the connector raises: it may have let go of it
            self.runner.connector.register({})
            self.platform.memory().sleep(tuple(keep))
        except BaseException:
            self._stay_awake(frees)
            raise
        self._weights_gone = frees
        if frees:
            holder.drop()

    def _stay_awake(self, frees: bool) -> None:
        """Puts back what `sleep` had taken away before it raised."""
        try:
            self._give_cache()
        except Exception:
            logger.exception("the KV connector raised when it was given the cache again")
        if frees:
            self.model.finish_load()
            self._start.holder.show()

    def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Brings back what is gone of the memory. Where it raised, it may be called again."""
        platform = self.platform
        if self._cache_gone or self._weights_gone:  # a platform that cannot sleep cannot wake either
            platform.memory().wake(tuple(tags))
        if "weights" in tags and self._weights_gone:
            # in place: a second copy beside the cache might find no room
            _, loader = self._open_weights({})
            load_weights(self.started.model, loader, platform.streams().fill)
            self._weights_gone = False
        if "kv_cache" in tags:
            self._give_cache()
        self._drop_stale_graphs()

    def _give_cache(self) -> None:
        if self._cache_gone:
            self.runner.connector.register(self.started.views)
            self._cache_gone = False

    def check_weights(self, **source: Any) -> None:
        """Raises with the reason why `update_weights` would fail; changes nothing."""
        model, (_, loader) = self._awake_model(), self._open_weights(source)
        if any(getattr(module, "kv_scales", None) is not None for module in model.modules()):
            raise RuntimeError("the scales of its 8-bit KV cache belong to captured steps and cannot change")
        WeightMap(model).plan(loader.tensors(), loader.complete)

    def update_weights(self, **source: Any) -> None:
        """Reads the weights that `source` names (see `with_weights`; {}: those served) into the model's own memory."""
        model, (config, loader) = self._awake_model(), self._open_weights(source)
        streams = self.platform.streams()
        self.runner.balance.settle()
        streams.synchronize()
        self._start.holder.suspend(config, loader)
        load_weights(model, loader, streams.fill)
        self._start.holder.renew(model, loader)
        self._drop_stale_graphs()
        self.config = config

    def save_sharded_state(self, path: str, loader: str = "sharded_state", **options: Any) -> None:
        """Has a weight loader store this rank's weights, as they are now, in the folder `path`."""
        if self.config.expert_balance.enable_eplb:
            raise ValueError("save_sharded_state: experts that are balanced move; start without enable_eplb to save")
        model, source = self._awake_model(), self._open_weights({})[1]
        target: WeightLoader = self.registry.make("loader", loader, LoaderSetup(Path(path), named=True), self.config)
        self.synchronize()
        target.store(model, source, **options)

    def read_adapter(self, key: int, path: str) -> str | None:
        """See `AdapterSlots.read`."""
        return self.runner.adapters.read(key, path)

    def drop_adapter(self, key: int) -> None:
        """See `AdapterSlots.drop`."""
        self.runner.adapters.drop(key)

    def check(self) -> None:
        """A worker in this process is as alive as its caller."""

    def close(self) -> None:
        """Drops model, cache, runner and what is captured of them, so that their memory returns within the process."""
        started, self._started = self._started, None
        extension, self._extension = self._extension, None
        if extension is not None:
            extension.close()
        if started is not None:
            started.runner.connector.close()
            started.runner.balance.close()
            started.runner.adapters.close()
            for exchange in exchanges_of(started.model):
                exchange.close()
            del self.runner
        del started
        self._start.close()
        gc.collect()

    def _awake_model(self) -> Model:
        if self._weights_gone:
            raise RuntimeError("the engine sleeps without its weights; wake it up first")
        return self.model

    def _open_weights(self, source: dict[str, Any]) -> tuple[FrameConfig, WeightLoader]:
        config = with_weights(self.config, **source)
        checkpoint = read_checkpoint(config)
        require_same_model(self.started.opened.checkpoint, checkpoint)
        return config, choose_loader(config, checkpoint, self.registry)

    def _drop_stale_graphs(self) -> None:
        """Drops the captured steps if a tensor that they read has moved; the engine then has them captured again."""
        inputs = self.runner.captured_inputs
        if (addresses := inputs.addresses()) != self._addresses:
            self.runner.device.graphs.drop()
            inputs.forget()
            self._addresses = addresses
