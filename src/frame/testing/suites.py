"""The contract suite of each kind of plugin, by the kind's name. `frame plugins check` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .adapters_suite import AdapterResolverSuite, AdaptersSuite
from .attention_suite import AttentionBackendSuite
from .balancer_suite import ExpertBalancerSuite
from .command_suite import CommandSuite
from .connector_suite import ConnectorSuite
from .endpoint_suite import EndpointSuite
from .exchange_suite import ExpertExchangeSuite
from .executor_suite import ExecutorSuite
from .extension_suite import WorkerExtensionSuite
from .grammar_suite import GrammarBackendSuite
from .latent_suite import IndexBackendSuite, LatentBackendSuite
from .loader_suite import WeightLoaderSuite
from .model_suite import ModelSuite
from .parser_suite import ReasoningParserSuite, ToolParserSuite
from .platform_suite import PlatformSuite
from .plugin_suite import PluginSuite
from .pooler_suite import PoolerSuite
from .processor_suite import LogitsProcessorSuite
from .quantization_suite import QuantizationSuite
from .route_policy_suite import RoutePolicySuite
from .scheduler_suite import SchedulerPolicySuite
from .sink_suite import MetricsSinkSuite
from .source_suite import ModelSourceSuite
from .speculator_suite import SpeculatorSuite
from .tier_policy_suite import TierPolicySuite
from .tokenizer_suite import TokenizerSuite

#: Kind → suite.
SUITES: Mapping[str, type[PluginSuite]] = MappingProxyType({
    "platform": PlatformSuite,
    "attention": AttentionBackendSuite,
    "model": ModelSuite,
    "connector": ConnectorSuite,
    "tier-policy": TierPolicySuite,
    "executor": ExecutorSuite,
    "scheduler": SchedulerPolicySuite,
    "balancer": ExpertBalancerSuite,
    "exchange": ExpertExchangeSuite,
    "speculator": SpeculatorSuite,
    "quantization": QuantizationSuite,
    "extension": WorkerExtensionSuite,
    "adapters": AdaptersSuite,
    "adapter-resolver": AdapterResolverSuite,
    "source": ModelSourceSuite,
    "loader": WeightLoaderSuite,
    "tokenizer": TokenizerSuite,
    "processor": LogitsProcessorSuite,
    "grammar": GrammarBackendSuite,
    "tool-parser": ToolParserSuite,
    "reasoning-parser": ReasoningParserSuite,
    "pooler": PoolerSuite,
    "endpoint": EndpointSuite,
    "command": CommandSuite,
    "sink": MetricsSinkSuite,
    "route-policy": RoutePolicySuite,
})  # fmt: skip


def suite_for(kind: str, **attributes: Any) -> type[PluginSuite]:
    """The suite of the plugin that `attributes` of a subclass name: of attention backends by what layers ask of it."""
    suite = SUITES[kind]
    if kind != "attention":
        return suite
    asked = getattr(type("Asked", (suite,), attributes)().found(), "spec_type", None)
    kinds = (AttentionBackendSuite, LatentBackendSuite, IndexBackendSuite)
    return next((one for one in kinds if one.spec_type is asked), suite)
