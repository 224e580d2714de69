"""`frame template FD`: a process that renders chat templates of clients; the descriptor is its socket to the server."""

from __future__ import annotations

import argparse

from ..interfaces.endpoint import Command


class TemplateCommand(Command):
    """Renders chats until its socket closes."""

    help = "Internal: a process that renders chat templates of clients, started by a server."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the inherited socket."""
        parser.add_argument("descriptor", type=int, help="File descriptor of an inherited socket.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until the server hangs up."""
        from ..front.template_process import serve_renderings
        from ..processes.child_process import die_with_parent

        die_with_parent()
        return serve_renderings(arguments.descriptor)
