"""`frame serve`: the HTTP server. The command itself imports no torch; engine and API are processes of their own."""

from __future__ import annotations

import argparse
import logging
import os
from typing import cast

from frame.served.first_check import check_modules
from frame.vllm_names.environment import API_KEY, api_key_of, lines_about

from ..config.checkpoint import read_checkpoint
from ..config.errors import ConfigError
from ..config.flag_parser import FlagParser
from ..config.flags import add_config_flags, config_from_arguments
from ..config.tree import FrameConfig
from ..interfaces.endpoint import Command
from ..plugin_host.model_sources import fetch_model
from ..plugin_host.registry import Registry
from ..startup.logging import configure_logging

logger = logging.getLogger(__name__)


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
        config = serve_config(arguments)
        registry = Registry.load()
        registry.check(config)
        if config.executor.node_rank == 0:
            check_modules(config, registry)
        config = fetch_model(config, command=True)
        read_checkpoint(config)
        if config.executor.node_rank > 0:
            return serve_node(config, registry)
        from ..processes.launcher import launch

        return launch(config)


def serve_node(config: FrameConfig, registry: Registry) -> int:
    """Runs this machine's workers of an engine on another one; raises `ConfigError` where that is impossible."""
    from ..plugin_host.setups import executor_provider, nodes_of

    configure_logging(config.server.log_level)
    provider = executor_provider(config, registry)
    executor = registry.resolve(provider)
    try:
        status: int = executor.serve_node(nodes_of(config), registry.options(provider, config))
    except (ValueError, TimeoutError) as error:
        raise ConfigError(str(error)) from None
    return status


def serve_config(arguments: argparse.Namespace) -> FrameConfig:
    """The configuration of parsed arguments, with the API key of vLLM's variable where none is given.

    Logs a line for each other variable of vLLM's that is set. Raises `ConfigError`.
    """
    config = config_from_arguments(arguments)
    if not config.server.api_key and (keys := api_key_of(os.environ)):
        config = config_from_arguments(arguments, api_key=keys)
        logger.info("clients need the key of %s; --api-key sets another", API_KEY)
    for line in lines_about(os.environ):
        logger.warning("%s", line)
    return config
