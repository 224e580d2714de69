"""`frame engine`: an engine process, started by frame itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from ..config.tree import FrameConfig
from ..interfaces.client import EngineCore
from ..interfaces.endpoint import Command
from ..interfaces.grammar import Vocabulary
from ..startup.logging import configure_logging


class EngineCommand(Command):
    """Builds the engine of a configuration and serves it on a Unix socket."""

    help = "An engine process (started by frame)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Where the configuration, the plugins and the sockets are."""
        parser.add_argument("--config-file", type=Path, required=True, help="The configuration as JSON.")
        parser.add_argument("--plugins-file", type=Path, required=True, help="The parent's choice of plugins.")
        parser.add_argument("--socket", required=True, help="Unix socket to listen on.")
        parser.add_argument("--control-fd", type=int, required=True, help="Inherited socket to the parent.")
        parser.add_argument("--journal-fd", type=int, help="Inherited memory for the journal of steps.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves from the parent's word on until it hangs up."""
        from ..processes.engine_process import EngineProcess

        config = FrameConfig.model_validate_json(arguments.config_file.read_text())
        configure_logging(config.server.log_level)
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
