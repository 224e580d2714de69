"""Builds an engine: workers first, then the scheduler and the connector for what the workers found.

In two phases: what takes time but no device may be done long before it is wanted. Nothing here runs after the start.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import msgspec

from frame.kv_events.start import make_events
from frame.layout.check import check_layout
from frame.layout.devices import check_devices
from frame.layout.line import layout_line
from frame.transfers.children import maker
from frame.transfers.merging import ResultMerge

from ..config.checkpoint import read_checkpoint
from ..config.errors import ConfigError
from ..config.tree import FrameConfig
from ..interfaces.client import EngineInfo
from ..interfaces.connector import ConnectorScheduler, NullConnectorScheduler
from ..interfaces.executor import Executor, WorkerFactory
from ..interfaces.executor_team import TeamExecutor
from ..interfaces.grammar import Vocabulary
from ..interfaces.kv import KVLayout
from ..interfaces.kv_layout import max_request_len
from ..parallel.rendezvous import Rendezvous, placements_of
from ..plugin_host.isolation import culprit
from ..plugin_host.model_choice import choose_model
from ..plugin_host.registry import Registry
from ..plugin_host.setups import connector_setup, engine_setup, executor_provider, executor_setup, mesh_of
from ..startup.bytecode import report_missing_bytecode
from .agreement import agreed_layout
from .engine import Engine
from .grammar.compiler import make_compiler
from .schedule.scheduler import Scheduler
from .schedule.step_budget import resolve_budget

logger = logging.getLogger("frame.engine")


#: Makes the workers of a complete configuration. The function that it takes is called with the name of each stage of a
#: worker's start; the text names the engine.
MakeWorkers: TypeAlias = Callable[[FrameConfig, Registry, Callable[[str], None], str], WorkerFactory]


class EngineStart:
    """An engine whose libraries and plugins are loaded and whose executor is made, and which holds no device yet.

    `progress` is called with the name of each stage as it begins; `vocabulary` reads the bytes of every token id when a
    grammar first needs them, without it there are no grammars. `rendezvous` is where its workers meet those of engines
    that share its experts. Raises one error with the root cause: a configuration, checkpoint or plugin error.
    """

    def __init__(
        self,
        config: FrameConfig,
        registry: Registry,
        make_workers: MakeWorkers,
        progress: Callable[[str], None] = lambda stage: None,
        vocabulary: Callable[[], Vocabulary] | None = None,
        rendezvous: str = "",
    ) -> None:
        import torch

        report_missing_bytecode(torch)
        self._registry = registry
        self._progress = progress
        self._vocabulary = vocabulary
        self._checkpoint = read_checkpoint(config)
        self._config = config = resolve_budget(config, self._checkpoint, registry)
        choose_model(self._checkpoint, registry)  # imports it
        check_layout(config, mesh_of(config), self._checkpoint, registry)
        self._engine_id = secrets.token_hex(8)
        workers = make_workers(config, registry, progress, self._engine_id)
        self._executor = self._make_executor(workers, rendezvous)

    def _make_executor(self, workers: WorkerFactory, shared: str) -> Executor:
        config, mesh = self._config, mesh_of(self._config)
        provider, parts = executor_provider(config, self._registry), (config, mesh, self._checkpoint, self._registry)
        devices = check_devices(*parts, self._registry.resolve(provider))
        if line := layout_line(*parts, devices):
            logger.info("layout: %s", line)
        if mesh.data > 1 and not shared:
            raise ConfigError(
                f"enable_expert_parallel with data_parallel_size {mesh.data}: engines that share experts are started "
                "by one server, which starts all of them, or by AsyncLLM"
            )
        self._rendezvous = Rendezvous(mesh.engine_size > 1 and not shared)
        placements = placements_of(mesh, shared or self._rendezvous.address, config.data_parallel)
        setup = executor_setup(config, self._checkpoint.max_model_len, placements, workers)
        with ExitStack() as undo:
            undo.callback(self._rendezvous.close)
            executor: Executor = self._registry.make("executor", provider, setup, config)
            undo.pop_all()
        return executor

    def await_workers(self) -> None:
        """Returns when workers in other processes have loaded their libraries, too; raises as the constructor does."""
        if isinstance(self._executor, TeamExecutor):
            with ExitStack() as undo:
                undo.callback(self._rendezvous.close)
                undo.callback(self._executor.close)
                self._executor.call("check")
                undo.pop_all()

    def finish(self) -> Engine:
        """Starts the workers and returns the engine; raises as the constructor does, and then nothing is left."""
        executor, config, make = self._executor, self._config, self._registry.make
        with ExitStack() as undo:
            undo.callback(executor.close)
            undo.callback(self._rendezvous.close)
            begun = time.perf_counter()
            facts = executor.load()
            loaded = time.perf_counter()
            layout = agreed_layout(config, mesh_of(config), facts)
            ready = executor.allocate(layout)
            spent = loaded - begun, time.perf_counter() - loaded
            logger.debug("workers: loaded in %.2f s, with a KV cache and captures in %.2f s more", *spent)
            self._progress("scheduler")
            compiler = make_compiler(config, self._registry, self._vocabulary)
            info = EngineInfo(
                **msgspec.structs.asdict(facts[mesh_of(config).output_rank].described),
                max_model_len=_fitting_length(config, layout, self._checkpoint.max_model_len),
                vocab_size=self._checkpoint.vocab_size,
                num_blocks=layout.pools[0],
                block_size=layout.block_size,
                encodes=any(group.keeps_encoded for group in layout.groups),
                stages=ready[-1].stages,
                pooling=ready[mesh_of(config).output_rank].pooling,
            )
            setup = connector_setup(config, info.max_model_len, layout, self._engine_id)
            setup = replace(setup, make=maker(self._registry, config))
            connector: ConnectorScheduler = NullConnectorScheduler(setup)
            if config.transfer.kv_connector is not None:
                connector = make("connector", config.transfer.kv_connector, setup, config)
            undo.callback(connector.close)
            connector.connect({rank: one.handshake for rank, one in enumerate(ready)})
            events = make_events(config, layout)
            undo.callback(events.close)
            policy_setup = engine_setup(config, info.max_model_len)
            scheduler = Scheduler(
                config=config,
                layout=layout,
                policy=make("scheduler", config.scheduler.scheduling_policy, policy_setup, config),
                connector=connector,
                max_model_len=info.max_model_len,
                max_in_flight=_max_in_flight(config, executor),
                num_stages=mesh_of(config).pipeline,
                compiler=compiler,
                prefix_tile_rows=info.prefix_tile_rows,
                prefix_costs=info.prefix_costs,
                call=executor.call,
                events=events,
            )
            engine = Engine(
                scheduler=scheduler,
                executor=executor,
                connector=connector,
                info=info,
                merge=ResultMerge(sum(fact.answers for fact in facts), scheduler.lifecycle.awaits),
                culprit=partial(culprit, self._registry),
                wants_capture=any(one.wants_capture for one in ready),
                on_close=self._rendezvous.close,
            )
            undo.pop_all()
        return engine


def _max_in_flight(config: FrameConfig, executor: Executor) -> int:
    """Steps that are launched at once: one for each pipeline stage, and one that waits."""
    if not config.scheduler.async_scheduling:
        return 1
    stages = mesh_of(config).pipeline
    return max(executor.max_in_flight, stages + 1 if stages > 1 else 0)


def _fitting_length(config: FrameConfig, layout: KVLayout, max_model_len: int) -> int:
    """The longest request that is served: no longer than the whole KV cache can hold alone."""
    fits = max_request_len(layout, max_model_len)
    if fits < 2:
        raise ValueError(
            f"the KV cache of {layout.pools[0] - 1} blocks of {layout.block_size} tokens is too small for any "
            "request: raise kv_cache_memory_bytes or num_gpu_blocks_override"
        )
    if config.model.max_model_len == -1:
        logger.info("max_model_len: %d (auto)", fits)
    elif fits < max_model_len:
        logger.warning("max_model_len is %d instead of %d: the KV cache holds no longer request", fits, max_model_len)
    return fits
