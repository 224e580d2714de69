"""The kinds of plugins, and the hook by which a package offers each. Hooks are called at start-up only.

A plugin is a module (or object) named by an entry point of group `frame`; it marks functions with `frame.hookimpl`.
Every hook takes no argument, is called once per `Registry.load`, in each process that chooses or builds plugins, and
returns descriptions only: nothing heavy may be imported before a provider is chosen. What a hook raises disables that
plugin and is reported by `frame plugins`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pluggy

from ..interfaces.provider import Provider

#: The entry-point group and pluggy's project name.
GROUP = "frame"

hookimpl = pluggy.HookimplMarker(GROUP)


class Kind(NamedTuple):
    """A kind of plugin: its hook, its name in sentences, and its interface ("module:Class"), if it has one."""

    hook: str
    noun: str
    interface: str | None = None


#: The comment above each kind says who builds its plugins, and how long they live; the API reference shows it.
KINDS = {
    #: A worker probes platforms when it starts and builds one for its device; it lives until the worker ends.
    #: `tags["early"]` ("package.module:function") is called as `function(setup, options)` before torch is imported,
    #: with a plain `Setup`; it begins work in a thread and returns at once.
    "platform": Kind("frame_platforms", "platform", "platform:Platform"),
    #: A worker builds one for each KV group after the model was built; it lives as long as the KV cache.
    "attention": Kind("frame_attention_backends", "attention backend", "attention:CacheBackend"),
    #: Named by the architecture that config.json states. A worker builds one before it loads weights; it lives until
    #: the worker ends. `tags["config"]`, JSON of a `ConfigReading`, says how the family's config.json is read.
    "model": Kind("frame_models", "model", "model:Model"),
    #: `target` is the scheduler side, `tags["worker"]` the worker side ("package.module:Class"). The engine builds the
    #: first, each worker the second, when the KV cache exists; both are closed with it. `tags["check"]` and
    #: `tags["device_bytes"]`, functions too, are called before, see `frame.transfers`.
    "connector": Kind("frame_kv_connectors", "KV connector", "connector:ConnectorScheduler"),
    #: A connector with a tier builds one through its setup, when the engine starts.
    "tier-policy": Kind("frame_tier_policies", "tier policy", "frame.tiers.policy:TierPolicy"),
    #: The engine builds one when it starts and closes it when it ends. With a tag "spawns" it has `workers.spawn` make
    #: each worker, whose processes then start before it is built.
    "executor": Kind("frame_executors", "executor", "executor:Executor"),
    #: The engine builds one when it starts; it lives as long as the engine.
    "scheduler": Kind("frame_schedulers", "scheduling policy", "scheduling:SchedulerPolicy"),
    #: Each worker of a model whose experts are balanced builds one when it starts; rank 0 of those that share experts
    #: asks it. `frame eplb simulate` builds them too.
    "balancer": Kind("frame_expert_balancers", "expert balancer", "balancer:ExpertBalancer"),
    #: A worker whose experts are spread over data ranks builds one for layers of experts that are alike; it lives until
    #: the worker ends.
    "exchange": Kind("frame_expert_exchanges", "expert exchange", "experts:ExpertExchange"),
    #: A worker builds the one that `--quantization` or the checkpoint's quantization_config names before it builds the
    #: model; it lives as long as the model is built.
    "quantization": Kind("frame_quantizations", "quantization", "quantization:Quantization"),
    #: A worker whose model serves adapters builds one before the model; it lives as long as the model is built.
    #: `tags["check"]` ("package.module:function") is called with each folder of `lora_modules` before a server starts.
    "adapters": Kind("frame_adapters", "adapter plugin", "adapters:Adapters"),
    #: Each API process that is to find adapters by name builds the one that the configuration names; it lives as long
    #: as the process.
    "adapter-resolver": Kind("frame_adapter_resolvers", "adapter resolver", "adapters:AdapterResolver"),
    #: A worker builds the one that the configuration names when the KV cache exists; it lives as long as the worker.
    "speculator": Kind("frame_speculators", "speculator", "speculator:Speculator"),
    #: Each worker builds the one that the configuration names when the KV cache exists, and closes it when it ends.
    "extension": Kind("frame_worker_extensions", "worker extension", "extension:WorkerExtension"),
    #: The process that a user starts builds one when a model or tokenizer is named that is no folder, and drops it once
    #: its files are there.
    "source": Kind("frame_model_sources", "model source", "source:ModelSource"),
    #: A worker builds one for each loading of weights; it is dropped once they are in place.
    "loader": Kind("frame_weight_loaders", "weight loader", "loader:WeightLoader"),
    #: Each API process and `LLM` builds one when it starts, and so does each process that renders templates of clients;
    #: an engine builds one for the vocabulary of its first grammar. It lives as long as the process.
    "tokenizer": Kind("frame_tokenizers", "tokenizer plugin", "tokenizer:Tokenizer"),
    #: `frame.interfaces.LogitsProcessor` classes, or vLLM-style ones, which are adapted. A worker builds all of them
    #: when it starts; they live as long as the worker.
    "processor": Kind("frame_logits_processors", "logits processor"),
    #: The engine builds one for the first request that constrains its output, and so does the process that tries
    #: grammars first; both live as long as the engine.
    "grammar": Kind("frame_grammars", "grammar backend", "grammar:GrammarBackend"),
    #: Each API process builds the one that is named when its text side is ready; it opens a reader for every output.
    "tool-parser": Kind("frame_tool_parsers", "tool parser", "parser:ToolParser"),
    #: Each API process builds the one that is named when its text side is ready; it opens a reader for every output.
    "reasoning-parser": Kind("frame_reasoning_parsers", "reasoning parser", "parser:ReasoningParser"),
    #: A worker of a pooling model builds the ones that its model needs when it starts; they live as long as the worker.
    "pooler": Kind("frame_poolers", "pooler", "pooling:Pooler"),
    #: HTTP routes. Each API process builds all of them when it starts; they live as long as the process.
    "endpoint": Kind("frame_endpoints", "endpoint", "endpoint:Endpoint"),
    #: Subcommands of `frame`. The command line builds the one that was typed, or all of them for `frame --help`.
    "command": Kind("frame_commands", "command", "endpoint:Command"),
    #: Each API process builds those that `--metrics-sinks` names when it starts, and closes them when it ends.
    "sink": Kind("frame_metrics_sinks", "metrics sink", "report:MetricsSink"),
    #: `frame route` builds the one that `--policy` names when it starts; it lives until the command ends.
    "route-policy": Kind("frame_route_policies", "route policy", "frame.routing.policy:RoutePolicy"),
}


@pluggy.HookspecMarker(GROUP)
def _hook() -> list[Provider]:
    """What every hook takes and returns."""
    return []


#: The hooks by name, as pluggy checks plugins against them.
HOOKS: Any = SimpleNamespace(**{kind.hook: _hook for kind in KINDS.values()})
