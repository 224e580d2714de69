"""The contract: what plugins implement and what crosses between the parts of frame.

Names are loaded on first use, so that importing one light class does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "provider": ("API_VERSION", "Provider"),
    "wire": ("decode", "encode"),
    "kv": ("ChunkedKV", "CrossKV", "FullKV", "KVGroup", "KVLayout", "KVSpec", "LatentKV", "SlidingKV", "StateKV"),
    "sampling": ("RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
    "pooling": ("Pooler", "PoolerRows", "PoolerSizes"),
    "pooling_params": ("PoolingFacts", "PoolingParams"),
    "step": (
        "BlockAppend", "LogprobRows", "NewRequest", "PrefixRows", "StepPlan", "StepResult", "TokenMasks",
        "TransferReport",
    ),
    "engine": ("EngineOutput", "EngineRequest", "EngineStats", "FinishReason"),
    "client": ("EngineClient", "EngineCore", "EngineDeadError", "EngineInfo"),
    "platform": (
        "EagerGraphs", "Graphs", "HostCopy", "Memory", "MemorySnapshot", "Platform", "PlatformSpec", "StepShape",
        "Streams",
    ),
    "attention": (
        "AttentionBackend", "AttentionBatch", "AttentionSpec", "LayerParams", "SharedPrefix", "stride_view",
    ),
    "model": ("Build", "ForwardStep", "Groups", "LayerHooks", "Model"),
    "connector": (
        "ConnectorScheduler", "ConnectorWorker", "NullConnectorScheduler", "NullConnectorWorker", "RequestView",
    ),
    "speculator": ("DraftContext", "Drafts", "NullSpeculator", "Speculator"),
    "executor": ("DeadWorkerError", "Executor", "StepHandle", "WorkerFactory", "WorkerProtocol"),
    "scheduling": ("Schedulable", "SchedulerPolicy"),
    "grammar": ("Grammar", "GrammarBackend", "GrammarMatcher", "Vocabulary"),
    "loader": ("LazyTensor", "WeightLoader"),
    "logits": ("LogitsProcessor",),
    "batch_logits": ("AdapterLogitsProcessor", "BatchLogitsProcessor", "BatchUpdate", "MoveDirectionality"),
    "parser": (
        "AssistantMessage", "CallArguments", "CallBegin", "CallEnd", "Content", "OutputEvent", "OutputReader",
        "ParserRequest", "Reasoning", "ReasoningParser", "Tool", "ToolCall", "ToolParser", "joined",
    ),
    "turn": ("Turn",),
    "errors": ("ErrorShape", "RequestError"),
    "endpoint": ("Command", "Endpoint", "Serving"),
    "report": ("MetricsSink", "RequestReport"),
    "schema": ("BoundedModel", "Limits", "SamplingFields"),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
