"""A subcommand: `frame example-hello --name you`."""

from __future__ import annotations

import argparse

from frame.interfaces import Command


class HelloCommand(Command):
    """Imports heavy modules inside `run` only, because `frame --help` builds every command."""

    help = "Greets a plugin author."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--name", default="plugin author", help="Who is greeted.")

    def run(self, arguments: argparse.Namespace) -> int:
        from frame import API_VERSION

        print(f"hello, {arguments.name}: this frame has plugin API {API_VERSION}")
        return 0
