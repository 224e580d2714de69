"""Builds an engine: workers first, then the scheduler and the connector for what the workers found.

In two phases: what takes time but no device may be done long before it is wanted. Nothing here runs after the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from ..config.checkpoint import Checkpoint, read_checkpoint
from ..config.tree import FrameConfig
from ..interfaces.client import EngineInfo
from ..interfaces.connector import ConnectorScheduler, NullConnectorScheduler
from ..interfaces.executor import Executor, WorkerFactory
from ..interfaces.grammar import Vocabulary
from ..interfaces.kv import KVLayout
from ..interfaces.kv_layout import max_request_len
from ..interfaces.mesh import Placement
from ..interfaces.pooling_params import PoolingFacts
from ..plugin_host.model_choice import choose_model
from ..plugin_host.registry import Registry
from ..plugin_host.setups import connector_setup, engine_setup, executor_setup, mesh_of
from ..startup.bytecode import report_missing_bytecode
from .engine import Engine
from .grammar.compiler import GrammarCompiler, make_compiler
from .schedule.scheduler import Scheduler
from .schedule.step_budget import resolve_budget

logger = logging.getLogger("frame.engine")


#: What makes workers for a settled configuration; each stage of a worker's start is told to the function.
MakeWorkers: TypeAlias = Callable[[FrameConfig, Registry, Callable[[str], None]], WorkerFactory]


class EngineStart:
    """An engine whose libraries and plugins are loaded and whose executor is made, and which holds no device yet.

    `progress` hears the name of each stage as it begins; `vocabulary` reads what token ids stand for when a grammar
    first needs it, without it there are no grammars. Raises one error with the root cause: a configuration, checkpoint
    or plugin error.
    """

    def __init__(
        self,
        config: FrameConfig,
        registry: Registry,
        make_workers: MakeWorkers,
        progress: Callable[[str], None] = lambda stage: None,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        import torch

        report_missing_bytecode(torch)
        self._registry = registry
        self._progress = progress
        self._vocabulary = vocabulary
        self._checkpoint = read_checkpoint(config)
        self._config = config = resolve_budget(config, self._checkpoint, registry)
        choose_model(self._checkpoint, registry)  # imports it
        workers = make_workers(config, registry, progress)
        registry.check_workers(config.executor)
        self._executor: Executor = registry.make(
            "executor",
            config.executor.executor,
            executor_setup(config, self._checkpoint.max_model_len, [Placement(mesh=mesh_of(config))], workers),
            config,
        )

    def finish(self) -> Engine:
        """Starts the workers and returns the engine; raises as the constructor does, and then nothing is left."""
        executor, config = self._executor, self._config
        try:
            layout = executor.start()
            facts = executor.call("describe")[0]
            self._progress("scheduler")
            compiler, no_grammars = make_compiler(config, self._registry, self._vocabulary)
            info = _describe(config, layout, facts, self._checkpoint)
            return self._assemble(layout, info, compiler, no_grammars, records=facts.get("records", False))
        except BaseException:
            executor.close()
            raise

    def _assemble(
        self, layout: KVLayout, info: EngineInfo, compiler: GrammarCompiler | None, no_grammars: str, *, records: bool
    ) -> Engine:
        config, registry, executor = self._config, self._registry, self._executor
        name = config.transfer.kv_connector
        setup = connector_setup(config, info.max_model_len, layout)
        connector: ConnectorScheduler = (
            NullConnectorScheduler(setup) if name is None else registry.make("connector", name, setup, config)
        )
        if name is not None:
            connector.connect(dict(enumerate(executor.call("handshake"))))
        depth = executor.max_in_flight if config.scheduler.async_scheduling else 1
        scheduler = Scheduler(
            config=config,
            layout=layout,
            policy=registry.make(
                "scheduler", config.scheduler.scheduling_policy, engine_setup(config, info.max_model_len), config
            ),
            connector=connector,
            max_model_len=info.max_model_len,
            max_in_flight=depth,
            compiler=compiler,
            no_grammars=no_grammars,
            prefix_tile_rows=info.prefix_tile_rows,
        )
        return Engine(
            scheduler=scheduler, executor=executor, connector=connector, info=info, depth=depth, records=records
        )


def _describe(config: FrameConfig, layout: KVLayout, facts: dict[str, Any], checkpoint: Checkpoint) -> EngineInfo:
    return EngineInfo(
        max_model_len=_fitting_length(config, layout, checkpoint.max_model_len),
        vocab_size=checkpoint.vocab_size,
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        platform=facts["platform"],
        attention=facts["attention"],
        dtype=facts["dtype"],
        stages=[tuple(stage) for stage in facts["stages"]],
        prefix_tile_rows=facts.get("prefix_tile_rows", 0),
        not_deterministic=facts.get("not_deterministic", ""),
        pooling=None if facts.get("pooling") is None else msgspec.convert(facts["pooling"], PoolingFacts),
    )


def _fitting_length(config: FrameConfig, layout: KVLayout, max_model_len: int) -> int:
    """The longest request that is served: no longer than the whole KV cache can hold alone."""
    fits = max_request_len(layout, max_model_len)
    if fits < 2:
        raise ValueError(
            f"the KV cache of {layout.num_blocks - 1} blocks of {layout.block_size} tokens is too small for any "
            "request: raise kv_cache_memory_bytes or num_gpu_blocks_override"
        )
    if config.model.max_model_len == -1:
        logger.info("max_model_len: %d (auto)", fits)
    elif fits < max_model_len:
        logger.warning("max_model_len is %d instead of %d: the KV cache holds no longer request", fits, max_model_len)
    return fits
