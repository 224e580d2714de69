"""`frame route`: a front for several servers."""

from __future__ import annotations

import argparse

from frame.interfaces import Command


class RouteCommand(Command):
    """Forwards requests to the servers that are named, and shows them on a page."""

    help = "One address in front of several servers: frame route URL URL."
    examples = (
        "frame route http://10.0.0.1:8000 http://10.0.0.2:8000",
        'frame route --servers servers.txt --api-key "$KEY" --server-key "$SERVER_KEY"',
        "frame route http://10.0.0.3:8000 --prefill http://10.0.0.1:8000 http://10.0.0.2:8000",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The servers, the policy, and the settings of the HTTP server."""
        from frame.routing.settings import add_flags

        add_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until a signal; raises `ConfigError` and `PluginError` before that."""
        from frame.routing.process import run_front
        from frame.routing.settings import settings_of

        return run_front(settings_of(arguments))
