"""The processes that frame starts itself, by the name that follows `frame` on their command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..config.tree import FrameConfig
from ..startup.logging import configure_logging

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..interfaces.grammar import GrammarBackend, Vocabulary
    from ..plugin_host.registry import Registry


class Child(NamedTuple):
    """What runs in the process, and the arguments that its parent passes: name → type. `_fd`: an inherited descriptor.

    `run` gets them as keywords; those that are `optional` only if the parent passes them.
    """

    run: Callable[..., int]
    needed: Mapping[str, type]
    optional: Mapping[str, type] = MappingProxyType({})


def run_child(name: str, arguments: Sequence[str]) -> int:
    """Runs the process `name` of `CHILDREN` until its parent ends it; returns the exit status."""
    child = CHILDREN[name]
    about = "Internal: frame starts this process itself."
    parser = argparse.ArgumentParser(prog=f"frame {name}", description=about, argument_default=argparse.SUPPRESS)
    for argument, kind in {**child.needed, **child.optional}.items():
        flag = "--" + argument.replace("_", "-")
        if argument == "descriptor":
            parser.add_argument(argument, type=int)
        elif kind is bool:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=kind, required=argument in child.needed)
    return child.run(**vars(parser.parse_args(arguments)))


def _read_config(file: Path) -> FrameConfig:
    """The configuration that the parent wrote; logging is set up as it says."""
    config = FrameConfig.model_validate_json(file.read_text())
    configure_logging(config.server.log_level)
    return config


def _serve_http(config_file: Path, **inherited: Any) -> int:
    config = _read_config(config_file)
    from ..processes.api_process import run_api_process

    return run_api_process(config, **inherited)


def _serve_engine(
    config_file: Path,
    plugins_file: Path,
    socket: str,
    control_fd: int,
    journal_fd: int | None = None,
    rendezvous: str = "",
) -> int:
    """`plugins_file` holds the parent's choice of plugins, `socket` is the path of the Unix socket to listen on.

    Workers of engines that share experts meet at `rendezvous`.
    """
    from ..processes.engine_process import EngineProcess

    plugins = json.loads(plugins_file.read_text())

    def prepare(config: FrameConfig, stage: Callable[[str], None]) -> Callable[[], Engine]:
        stage("libraries")
        from frame.links.early_workers import begin_workers

        from ..plugin_host.registry import Registry
        from ..startup.early import begin_platforms

        registry = Registry.load(plugins)
        with begin_workers(config, registry) as begun:
            begin_platforms(config, registry)
            from ..engine.assembly import EngineStart
            from ..worker.factory import Workers

            vocabulary, make = partial(_read_vocabulary, config, registry), partial(Workers, begun=begun)
            start = EngineStart(config, registry, make, stage, vocabulary, rendezvous)
            start.await_workers()
            return start.finish

    return EngineProcess(_read_config(config_file), socket, control_fd, prepare, journal_fd).run()


def _serve_worker(descriptor: int, heartbeat: int) -> int:
    from ..processes.child_process import switch_often

    switch_often()
    from ..worker.worker_process import serve_worker

    return serve_worker(descriptor, heartbeat)


def _render_templates(descriptor: int) -> int:
    from ..front.template_process import serve_renderings
    from ..processes.child_process import die_with_parent

    die_with_parent()
    return serve_renderings(descriptor)


def _try_grammars(descriptor: int) -> int:
    from ..engine.grammar.trial import serve_trials
    from ..processes.child_process import die_with_parent

    die_with_parent()
    return serve_trials(descriptor, _build_grammars)


def _build_grammars(config: FrameConfig, choices: list[Any]) -> GrammarBackend:
    from ..plugin_host.registry import Registry
    from ..plugin_host.setups import grammar_setup

    registry = Registry.load(choices)
    provider = registry.select("grammar", config.structured_outputs.structured_outputs_backend, lambda _: None)
    setup = grammar_setup(config, _read_vocabulary(config, registry))
    return cast("GrammarBackend", registry.make("grammar", provider, setup, config))


def _read_vocabulary(config: FrameConfig, registry: Registry) -> Vocabulary:
    from ..config.checkpoint import read_checkpoint
    from ..front.tokenizer import TokenizerSource

    return TokenizerSource(config, read_checkpoint(config), registry).vocabulary()


_FROM_PARENT = {"config_file": Path, "control_fd": int}
_SOCKET = {"descriptor": int}
CHILDREN: Mapping[str, Child] = MappingProxyType({
    # an API process of `frame serve`; `successor`: it takes the place of one that died
    "api": Child(
        _serve_http,
        {**_FROM_PARENT, "listen_fd": int},
        {"metrics_fd": int, "limits_fd": int, "ranks_fd": int, "admin_fd": int, "index": int, "successor": bool},
    ),
    # the engine of `frame serve` and `AsyncLLM`
    "engine": Child(
        _serve_engine,
        {**_FROM_PARENT, "plugins_file": Path, "socket": str},
        {"journal_fd": int, "rendezvous": str},
    ),
    # a worker of the executor `process`
    "worker": Child(_serve_worker, {**_SOCKET, "heartbeat": int}),
    # renders the chat templates of clients for an API process
    "template": Child(_render_templates, _SOCKET),
    # tries grammars for an engine
    "grammar": Child(_try_grammars, _SOCKET),
})  # fmt: skip
