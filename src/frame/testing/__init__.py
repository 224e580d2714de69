"""For plugin authors: a contract suite for each kind of plugin, test doubles, and tiny models.

Names are loaded on first use. The suites need pytest (`pip install frame-llm[test]`); nothing else here does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention_suite import AttentionBackendSuite as AttentionBackendSuite
    from .checkpoints import make_checkpoint as make_checkpoint
    from .command_suite import CommandSuite as CommandSuite
    from .connector_suite import ConnectorSuite as ConnectorSuite
    from .endpoint_suite import EndpointSuite as EndpointSuite
    from .executor_suite import ExecutorSuite as ExecutorSuite
    from .fake_executor import FakeExecutor as FakeExecutor, FakeWorkers as FakeWorkers
    from .fake_serving import FakeServing as FakeServing
    from .fake_worker import FakeWorker as FakeWorker
    from .grammar_suite import GrammarBackendSuite as GrammarBackendSuite
    from .loader_suite import WeightLoaderSuite as WeightLoaderSuite
    from .model_suite import ModelSuite as ModelSuite
    from .parser_suite import ReasoningParserSuite as ReasoningParserSuite, ToolParserSuite as ToolParserSuite
    from .platform_suite import PlatformSuite as PlatformSuite
    from .plugin_suite import PluginSuite as PluginSuite
    from .pooler_suite import PoolerSuite as PoolerSuite
    from .processor_suite import LogitsProcessorSuite as LogitsProcessorSuite
    from .reference_attention import ReferenceAttention as ReferenceAttention
    from .scheduler_suite import SchedulerPolicySuite as SchedulerPolicySuite
    from .setups import make_setup as make_setup
    from .sink_suite import MetricsSinkSuite as MetricsSinkSuite
    from .source_suite import ModelSourceSuite as ModelSourceSuite
    from .speculator_suite import SpeculatorSuite as SpeculatorSuite
    from .suites import SUITES as SUITES

_HOMES = {
    "attention_suite": ("AttentionBackendSuite",),
    "checkpoints": ("make_checkpoint",),
    "command_suite": ("CommandSuite",),
    "connector_suite": ("ConnectorSuite",),
    "endpoint_suite": ("EndpointSuite",),
    "executor_suite": ("ExecutorSuite",),
    "fake_executor": ("FakeExecutor", "FakeWorkers"),
    "fake_serving": ("FakeServing",),
    "fake_worker": ("FakeWorker",),
    "grammar_suite": ("GrammarBackendSuite",),
    "loader_suite": ("WeightLoaderSuite",),
    "model_suite": ("ModelSuite",),
    "parser_suite": ("ReasoningParserSuite", "ToolParserSuite"),
    "platform_suite": ("PlatformSuite",),
    "pooler_suite": ("PoolerSuite",),
    "plugin_suite": ("PluginSuite",),
    "processor_suite": ("LogitsProcessorSuite",),
    "reference_attention": ("ReferenceAttention",),
    "scheduler_suite": ("SchedulerPolicySuite",),
    "setups": ("make_setup",),
    "sink_suite": ("MetricsSinkSuite",),
    "source_suite": ("ModelSourceSuite",),
    "speculator_suite": ("SpeculatorSuite",),
    "suites": ("SUITES",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
