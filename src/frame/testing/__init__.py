"""For plugin authors: a contract suite for each kind of plugin, test doubles, and tiny models.

The imports below are the list of names; each is done on first use. The suites need pytest (`pip install
frame-llm[test]`); nothing else here does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.lazy import lazy_names

if TYPE_CHECKING:
    from .adapters_suite import AdapterResolverSuite as AdapterResolverSuite, AdaptersSuite as AdaptersSuite
    from .attention_suite import AttentionBackendSuite as AttentionBackendSuite
    from .balancer_suite import ExpertBalancerSuite as ExpertBalancerSuite
    from .checkpoints import make_checkpoint as make_checkpoint
    from .command_suite import CommandSuite as CommandSuite
    from .connector_suite import ConnectorSuite as ConnectorSuite
    from .endpoint_suite import EndpointSuite as EndpointSuite
    from .exchange_suite import ExpertExchangeSuite as ExpertExchangeSuite
    from .executor_suite import ExecutorSuite as ExecutorSuite
    from .extension_suite import WorkerExtensionSuite as WorkerExtensionSuite
    from .fake_executor import FakeExecutor as FakeExecutor, FakeWorkers as FakeWorkers
    from .fake_serving import FakeServing as FakeServing
    from .fake_worker import FakeWorker as FakeWorker
    from .grammar_suite import GrammarBackendSuite as GrammarBackendSuite
    from .latent_suite import IndexBackendSuite as IndexBackendSuite, LatentBackendSuite as LatentBackendSuite
    from .loader_suite import WeightLoaderSuite as WeightLoaderSuite
    from .model_suite import ModelSuite as ModelSuite
    from .parser_suite import ReasoningParserSuite as ReasoningParserSuite, ToolParserSuite as ToolParserSuite
    from .platform_suite import PlatformSuite as PlatformSuite
    from .plugin_suite import PluginSuite as PluginSuite
    from .pooler_suite import PoolerSuite as PoolerSuite
    from .processor_suite import LogitsProcessorSuite as LogitsProcessorSuite
    from .quantization_suite import QuantizationSuite as QuantizationSuite
    from .ranks import run_mesh as run_mesh, run_ranks as run_ranks
    from .reference_attention import ReferenceAttention as ReferenceAttention
    from .route_policy_suite import RoutePolicySuite as RoutePolicySuite
    from .scheduler_suite import SchedulerPolicySuite as SchedulerPolicySuite
    from .setups import make_setup as make_setup
    from .sink_suite import MetricsSinkSuite as MetricsSinkSuite
    from .source_suite import ModelSourceSuite as ModelSourceSuite
    from .speculator_suite import SpeculatorSuite as SpeculatorSuite
    from .suites import SUITES as SUITES
    from .thread_executor import ThreadExecutor as ThreadExecutor
    from .tier_policy_suite import TierPolicySuite as TierPolicySuite
    from .tokenizer_suite import TokenizerSuite as TokenizerSuite
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
