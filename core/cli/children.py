"""The subcommands that frame starts itself as child processes. They read what to do from inherited descriptors."""

from __future__ import annotations

import argparse
import json
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..config.tree import FrameConfig
from ..interfaces.endpoint import Command
from ..startup.logging import configure_logging

if TYPE_CHECKING:
    from ..interfaces.client import EngineCore
    from ..interfaces.grammar import GrammarBackend, Vocabulary


class ApiCommand(Command):
    """`frame api`: an API process, which serves HTTP on an inherited socket."""

    help = "Internal: an API process, started by frame serve."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Where the configuration and the sockets are; the names are those of `run_api_process`."""
        parser.add_argument("--config-file", type=Path, required=True, help="The configuration as JSON.")
        parser.add_argument("--listen-fd", type=int, required=True, help="Inherited socket to accept from.")
        parser.add_argument("--control-fd", type=int, required=True, help="Inherited socket to the parent.")
        parser.add_argument("--metrics-fd", type=int, help="Inherited file in which API processes count together.")
        parser.add_argument("--limits-fd", type=int, help="Inherited file in which they count what each key does.")
        parser.add_argument("--admin-fd", type=int, help="Inherited socket to accept admin requests from.")
        parser.add_argument("--index", type=int, default=0, help="The number of this API process, from 0.")
        parser.add_argument("--successor", action="store_true", help="It takes the place of one that died.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until told to stop."""
        values = vars(arguments)
        config = _read_config(values.pop("config_file"))
        from ..processes.api_process import run_api_process

        return run_api_process(config, **values)


class EngineCommand(Command):
    """`frame engine`: builds the engine of a configuration and serves it on a Unix socket."""

    help = "Internal: an engine process, started by frame serve and AsyncLLM."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Where the configuration, the plugins and the sockets are."""
        parser.add_argument("--config-file", type=Path, required=True, help="The configuration as JSON.")
        parser.add_argument("--plugins-file", type=Path, required=True, help="The parent's choice of plugins.")
        parser.add_argument("--socket", required=True, help="Unix socket to listen on.")
        parser.add_argument("--control-fd", type=int, required=True, help="Inherited socket to the parent.")
        parser.add_argument("--journal-fd", type=int, help="Inherited memory for the journal of steps.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Waits until the parent orders the engine, then serves until the parent hangs up."""
        from ..processes.engine_process import EngineProcess

        config = _read_config(arguments.config_file)
        plugins = json.loads(arguments.plugins_file.read_text())

        def prepare(config: FrameConfig, stage: Callable[[str], None]) -> Callable[[], EngineCore]:
            stage("libraries")
            from ..plugin_host.registry import Registry
            from ..startup.early import begin_platforms

            registry = Registry.load(plugins)
            begin_platforms(config, registry)
            from ..config.checkpoint import read_checkpoint
            from ..engine.assembly import EngineStart
            from ..front.vocabulary import read_vocabulary
            from ..worker.factory import Workers

            def vocabulary() -> Vocabulary:
                return read_vocabulary(config, read_checkpoint(config))

            return EngineStart(config, registry, Workers, stage, vocabulary).finish

        return EngineProcess(config, arguments.socket, arguments.control_fd, prepare, arguments.journal_fd).run()


class _SocketCommand(Command):
    """A process whose only argument is its socket to the process that started it; it ends when that hangs up."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the inherited socket."""
        parser.add_argument("descriptor", type=int, help="File descriptor of an inherited socket.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until the starter hangs up."""
        return self.serve(arguments.descriptor)

    @abstractmethod
    def serve(self, descriptor: int) -> int:
        """Answers what arrives on the socket; returns the exit status."""


class WorkerCommand(_SocketCommand):
    """`frame worker FD`: a worker process, started by an executor."""

    help = "Internal: a worker process, started by an executor."

    def serve(self, descriptor: int) -> int:
        from ..worker.worker_process import serve_worker

        return serve_worker(descriptor)


class TemplateCommand(_SocketCommand):
    """`frame template FD`: a process that renders chat templates of clients, started by an API process."""

    help = "Internal: a process that renders chat templates of clients, started by a server."

    def serve(self, descriptor: int) -> int:
        from ..front.template_process import serve_renderings
        from ..processes.child_process import die_with_parent

        die_with_parent()
        return serve_renderings(descriptor)


class GrammarCommand(_SocketCommand):
    """`frame grammar FD`: a process that tries grammars, started by an engine."""

    help = "Internal: a process that tries grammars, started by an engine."

    def serve(self, descriptor: int) -> int:
        from ..engine.grammar.trial import serve_trials
        from ..processes.child_process import die_with_parent

        die_with_parent()
        return serve_trials(descriptor, _build_grammars)


def _build_grammars(config: FrameConfig, choices: list[Any]) -> GrammarBackend:
    from ..config.checkpoint import read_checkpoint
    from ..front.vocabulary import read_vocabulary
    from ..plugin_host.registry import Registry
    from ..plugin_host.setups import grammar_setup

    registry = Registry.load(choices)
    provider = registry.select("grammar", config.structured_outputs.structured_outputs_backend, lambda _: None)
    vocabulary = read_vocabulary(config, read_checkpoint(config))
    return cast("GrammarBackend", registry.make("grammar", provider, grammar_setup(config, vocabulary), config))


def _read_config(file: Path) -> FrameConfig:
    """The configuration that the parent wrote; logging is set up as it says."""
    config = FrameConfig.model_validate_json(file.read_text())
    configure_logging(config.server.log_level)
    return config
