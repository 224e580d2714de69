"""Fills the setups of `frame.interfaces`, with which plugins are built, from a configuration. Knows no plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from ..config.tree import FrameConfig
from ..interfaces.mesh import Mesh, Placement
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


class _EngineFields(TypedDict):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    deterministic: bool
    seed: int


def _engine_fields(config: FrameConfig, max_model_len: int) -> _EngineFields:
    """`config` is one whose step sizes are settled, and `max_model_len` the checkpoint's."""
    return {
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_model_len": max_model_len,
        "deterministic": config.model.deterministic,
        "seed": config.model.seed,
    }


def mesh_of(config: FrameConfig) -> Mesh:
    """The parallel axes that the configuration asks for."""
    return Mesh(pipeline=config.executor.pipeline_parallel_size, tensor=config.executor.tensor_parallel_size)


def engine_setup(config: FrameConfig, max_model_len: int) -> EngineSetup:
    """For scheduling policies."""
    return EngineSetup(**_engine_fields(config, max_model_len))


def platform_setup(config: FrameConfig, max_model_len: int, placement: Placement) -> PlatformSetup:
    """For the platform of one worker."""
    return PlatformSetup(
        **_engine_fields(config, max_model_len),
        placement=placement,
        enforce_eager=config.executor.enforce_eager,
        shares_prefixes=config.attention.shared_prefix_min_tokens != 0,
        num_threads=config.executor.num_threads,
    )


def executor_setup(
    config: FrameConfig, max_model_len: int, placements: Sequence[Placement], workers: WorkerFactory
) -> ExecutorSetup:
    """For the executor of an engine."""
    return ExecutorSetup(
        **_engine_fields(config, max_model_len), mesh=mesh_of(config), placements=placements, workers=workers
    )


def connector_setup(config: FrameConfig, max_model_len: int, layout: KVLayout, engine_id: str = "") -> ConnectorSetup:
    """For the connector's scheduler side."""
    return ConnectorSetup(
        **_engine_fields(config, max_model_len),
        layout=layout,
        role=config.transfer.kv_role,
        engine_id=engine_id,
        mesh=mesh_of(config),
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
    return ConnectorWorkerSetup(
        **_engine_fields(config, max_model_len),
        layout=layout,
        role=config.transfer.kv_role,
        engine_id=engine_id,
        mesh=mesh_of(config),
        placement=placement,
        streams=platform.streams(),
        memory=platform.memory(),
    )


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
    server = config.server
    settings = EndpointSettings(
        response_role=server.response_role,
        return_tokens_as_token_ids=server.return_tokens_as_token_ids,
        enable_prompt_tokens_details=server.enable_prompt_tokens_details,
        enable_force_include_usage=server.enable_force_include_usage,
        enable_tokenizer_info_endpoint=server.enable_tokenizer_info_endpoint,
        page=server.page,
        tool_server=tuple(server.tool_server),
        rpc_methods=tuple(server.rpc_methods),
        weights_root=server.weights_root,
        max_upload_bytes=server.max_upload_bytes,
    )
    return EndpointSetup(serving, settings)
