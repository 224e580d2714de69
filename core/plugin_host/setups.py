"""Makes the setups with which plugins are built from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..config.tree import FrameConfig
from ..interfaces.executor import Executor
from ..interfaces.mesh import Mesh, Nodes, Placement
from ..interfaces.setup import (
    ConnectorSetup,
    ConnectorWorkerSetup,
    EndpointSettings,
    EndpointSetup,
    EngineSetup,
    ExecutorSetup,
    GrammarSetup,
    PlatformSetup,
)

if TYPE_CHECKING:
    from ..interfaces.executor import WorkerFactory
    from ..interfaces.grammar import Vocabulary
    from ..interfaces.kv import KVLayout
    from ..interfaces.platform import Platform
    from ..interfaces.provider import Provider
    from .registry import Registry


def mesh_of(config: FrameConfig) -> Mesh:
    """The parallel axes that the configuration asks for; engines that share nothing have a mesh each."""
    executor = config.executor
    return Mesh(
        data=config.data_parallel.data_parallel_size if executor.enable_expert_parallel else 1,
        pipeline=executor.pipeline_parallel_size,
        tensor=executor.tensor_parallel_size,
        decode_context=executor.decode_context_parallel_size,
        prefill_context=executor.prefill_context_parallel_size,
        expert_parallel=executor.enable_expert_parallel,
    )


def engine_setup(config: FrameConfig, max_model_len: int) -> EngineSetup:
    """For scheduling policies. `config` has settled step sizes, and `max_model_len` is the checkpoint's."""
    return EngineSetup(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        deterministic=config.model.deterministic,
        seed=config.model.seed,
    )


def platform_setup(config: FrameConfig, max_model_len: int, placement: Placement, steps_key: str = "") -> PlatformSetup:
    """For the platform of one worker."""
    return PlatformSetup(
        **vars(engine_setup(config, max_model_len)),
        placement=placement,
        enforce_eager=config.executor.enforce_eager,
        shares_prefixes=config.attention.shared_prefix_min_tokens != 0,
        num_threads=config.executor.num_threads,
        serves_adapters=config.adapters.enable_lora,
        steps_key=steps_key,
    )


def executor_provider(config: FrameConfig, registry: Registry) -> Provider:
    """The executor asked for, or the preferred one that runs so many workers; raises `PluginError` with reasons."""
    mesh, nnodes = mesh_of(config), config.executor.nnodes

    def why_not(executor: type[Executor]) -> str | None:
        if nnodes > 1 and executor.serve_node.__func__ is Executor.serve_node.__func__:  # type: ignore[attr-defined]
            return f"it runs no workers on other nodes, and nnodes is {nnodes}"
        return executor.supports(mesh)

    return registry.select("executor", config.executor.executor, why_not)


def executor_setup(
    config: FrameConfig, max_model_len: int, placements: Sequence[Placement], workers: WorkerFactory
) -> ExecutorSetup:
    """For the executor of an engine."""
    return ExecutorSetup(
        **vars(engine_setup(config, max_model_len)),
        mesh=mesh_of(config),
        placements=placements,
        workers=workers,
        hang_seconds=config.server.hang_seconds,
        nodes=nodes_of(config),
    )


def nodes_of(config: FrameConfig) -> Nodes:
    """The machines that the configuration names, with the settings that must be equal on all of them."""
    executor = config.executor
    if executor.nnodes == 1:
        return Nodes()
    return Nodes(
        count=executor.nnodes,
        rank=executor.node_rank,
        address=executor.master_addr,
        port=executor.master_port,
        model=str(config.model.model),
        settings=shared_settings(config, "model", "cache", "executor", "attention", "speculation", "load"),
    )


def shared_settings(config: FrameConfig, *groups: str, own: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of `groups` that must be equal on all machines, as JSON values by name; each may have its `own`."""
    plain = config.to_plain()
    # nor what a machine says of itself, and what the engine settles; plugins' settings may be secret
    own = ("executor.node_rank", "executor.enforce_eager", "model.model", *own)
    found = {f"{group}.{name}": value for group in groups for name, value in plain[group].items()}
    return {name: value for name, value in found.items() if name not in own}


def connector_setup(config: FrameConfig, max_model_len: int, layout: KVLayout, engine_id: str = "") -> ConnectorSetup:
    """For the connector's scheduler side."""
    return ConnectorSetup(
        **vars(engine_setup(config, max_model_len)),
        layout=layout,
        role=config.transfer.kv_role,
        engine_id=engine_id,
        mesh=mesh_of(config),
        data_rank=config.data_parallel.data_parallel_rank or 0,
        address=config.transfer.kv_ip,
    )


def connector_worker_setup(
    config: FrameConfig,
    max_model_len: int,
    layout: KVLayout,
    placement: Placement,
    platform: Platform,
    engine_id: str = "",
) -> ConnectorWorkerSetup:
    """For the connector's worker side, on the device of `platform`."""
    fields = vars(connector_setup(config, max_model_len, layout, engine_id))
    return ConnectorWorkerSetup(**fields, placement=placement, streams=platform.streams(), memory=platform.memory())


def grammar_setup(config: FrameConfig, vocabulary: Vocabulary) -> GrammarSetup:
    """For the grammar backend, in the engine and in the process that tries grammars."""
    settings = config.structured_outputs
    return GrammarSetup(
        vocabulary,
        disable_any_whitespace=settings.disable_any_whitespace,
        any_whitespace=settings.any_whitespace,
        disable_additional_properties=settings.disable_additional_properties,
    )


def endpoint_setup(config: FrameConfig, serving: Any) -> EndpointSetup:
    """For the endpoints of an API process, to which `serving` is a `Serving`."""
    values: dict[str, Any] = {"vllm_metrics": config.observability.vllm_metrics}
    for name in EndpointSettings.__dataclass_fields__.keys() - values:
        value = getattr(config.server, name)
        values[name] = tuple(value) if isinstance(value, list) else value
    return EndpointSetup(serving, EndpointSettings(**values))
