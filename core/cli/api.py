"""`frame api`: an API process, started by `frame serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..config.tree import FrameConfig
from ..interfaces.endpoint import Command
from ..startup.logging import configure_logging


class ApiCommand(Command):
    """Serves HTTP on an inherited socket."""

    help = "An API process (started by frame)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Where the configuration and the sockets are."""
        parser.add_argument("--config-file", type=Path, required=True, help="The configuration as JSON.")
        parser.add_argument("--listen-fd", type=int, required=True, help="Inherited socket to accept from.")
        parser.add_argument("--control-fd", type=int, required=True, help="Inherited socket to the parent.")
        parser.add_argument("--metrics-fd", type=int, help="Inherited file in which API processes count together.")
        parser.add_argument("--limits-fd", type=int, help="Inherited file in which they count what each key does.")
        parser.add_argument("--admin-fd", type=int, help="Inherited socket to accept admin requests from.")
        parser.add_argument("--index", type=int, default=0, help="Which of them this is.")

        parser.add_argument("--successor", action="store_true", help="It takes the place of one that died.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until told to stop."""
        config = FrameConfig.model_validate_json(arguments.config_file.read_text())
        configure_logging(config.server.log_level)
        from ..processes.api_process import run_api_process

        return run_api_process(
            config,
            arguments.listen_fd,
            arguments.control_fd,
            arguments.metrics_fd,
            arguments.limits_fd,
            arguments.admin_fd,
            index=arguments.index,
            successor=arguments.successor,
        )
