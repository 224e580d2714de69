"""`frame serve`: the HTTP server. The command itself imports no torch; engine and API are processes of their own."""

from __future__ import annotations

import argparse
from typing import cast

from ..config.checkpoint import read_checkpoint
from ..config.flag_parser import FlagParser
from ..config.flags import add_config_flags, config_from_arguments
from ..interfaces.endpoint import Command
from ..registry import Registry


class ServeCommand(Command):
    """Checks what can be checked at once, then starts the server."""

    help = "Serve a model over HTTP: frame serve [MODEL]."
    examples = (
        "frame serve                                            # the demo model",
        "frame serve /models/qwen3 --max-model-len 8k --port 8001",
        'frame serve --config serve.yaml --api-key "$KEY"        # flags beat the file',
        "frame serve --help=scheduler                           # the settings of a group",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """All settings of the configuration tree."""
        add_config_flags(cast("FlagParser", parser))

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until a signal; raises `ConfigError` or `PluginError` before anything is started."""
        config = config_from_arguments(arguments)
        Registry.load().check(config)
        read_checkpoint(config)
        from ..processes.launcher import launch

        return launch(config)
