"""The hooks by which a package offers plugins. Called at start-up only, never per step or request.

A plugin is a module (or object) named by an entry point of group `frame`; it marks functions with `frame.hookimpl`.
Every hook takes no argument, is called once per `Registry.load`, in each process that chooses or builds plugins, and
returns descriptions only: nothing heavy may be imported before a provider is chosen. What a hook raises disables that
plugin and is reported by `frame plugins`.
"""

from __future__ import annotations

import pluggy

from ..interfaces.provider import Provider

#: The entry-point group and pluggy's project name.
GROUP = "frame"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def frame_platforms() -> list[Provider]:
    """Platforms: `frame.interfaces.Platform` classes.

    A worker probes them when it starts and builds one for its device; it lives until the worker ends. `tags["early"]`
    ("package.module:function") is called as `function(setup, options)` before torch is imported, with a plain `Setup`;
    it begins work in a thread and returns at once.
    """
    return []


@hookspec
def frame_attention_backends() -> list[Provider]:
    """Attention backends: `frame.interfaces.AttentionBackend` classes.

    A worker builds one for each KV group after the model was built; it lives as long as the KV cache.
    """
    return []


@hookspec
def frame_models() -> list[Provider]:
    """Models: `frame.interfaces.Model` classes, named by the architecture that config.json states.

    A worker builds one before it loads weights; it lives until the worker ends.
    """
    return []


@hookspec
def frame_kv_connectors() -> list[Provider]:
    """KV connectors: `target` is the scheduler side, `tags["worker"]` the worker side ("package.module:Class").

    The engine builds the first, each worker the second, when the KV cache exists; both are closed with it.
    """
    return []


@hookspec
def frame_executors() -> list[Provider]:
    """Executors: `frame.interfaces.Executor` classes.

    The engine builds one when it starts and closes it when it ends.
    """
    return []


@hookspec
def frame_schedulers() -> list[Provider]:
    """Scheduling policies: `frame.interfaces.SchedulerPolicy` classes.

    The engine builds one when it starts; it lives as long as the engine.
    """
    return []


@hookspec
def frame_speculators() -> list[Provider]:
    """Speculators: `frame.interfaces.Speculator` classes.

    A worker builds the one that the configuration names when the KV cache exists; it lives as long as the worker.
    """
    return []


@hookspec
def frame_model_sources() -> list[Provider]:
    """Model sources: `frame.interfaces.ModelSource` classes.

    The process that a user starts builds one when a model or tokenizer is named that is no folder, and drops it once
    its files are there.
    """
    return []


@hookspec
def frame_weight_loaders() -> list[Provider]:
    """Weight loaders: `frame.interfaces.WeightLoader` classes.

    A worker builds one for each loading of weights; it is dropped once they are in place.
    """
    return []


@hookspec
def frame_logits_processors() -> list[Provider]:
    """Logits processors: `frame.interfaces.LogitsProcessor` classes (or vLLM-style ones).

    A worker builds all of them when it starts; they live as long as the worker.
    """
    return []


@hookspec
def frame_grammars() -> list[Provider]:
    """Grammar backends: `frame.interfaces.GrammarBackend` classes.

    The engine builds one for the first request that constrains its output, and so does the process that tries grammars
    first; both live as long as the engine.
    """
    return []


@hookspec
def frame_tool_parsers() -> list[Provider]:
    """Tool parsers: `frame.interfaces.ToolParser` classes.

    Each API process builds the one that is named when its text side is ready; it opens a reader for every output.
    """
    return []


@hookspec
def frame_reasoning_parsers() -> list[Provider]:
    """Reasoning parsers: `frame.interfaces.ReasoningParser` classes.

    Each API process builds the one that is named when its text side is ready; it opens a reader for every output.
    """
    return []


@hookspec
def frame_poolers() -> list[Provider]:
    """Poolers: `frame.interfaces.Pooler` classes.

    A worker of a pooling model builds the ones that its model needs when it starts; they live as long as the worker.
    """
    return []


@hookspec
def frame_endpoints() -> list[Provider]:
    """HTTP routes: `frame.interfaces.Endpoint` classes.

    Each API process builds all of them when it starts; they live as long as the process.
    """
    return []


@hookspec
def frame_commands() -> list[Provider]:
    """Subcommands of `frame`: `frame.interfaces.Command` classes.

    The command line builds the one that was typed, or all of them for `frame --help`.
    """
    return []


@hookspec
def frame_metrics_sinks() -> list[Provider]:
    """Metrics sinks: `frame.interfaces.MetricsSink` classes.

    Each API process builds those that `--metrics-sinks` names when it starts, and closes them when it ends.
    """
    return []
