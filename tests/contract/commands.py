"""A command to try the suite on."""

import argparse

from frame.interfaces import Command


class Greet(Command):
    help = "Greets."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--name", default="you")

    def run(self, arguments: argparse.Namespace) -> int:
        print("hello", arguments.name)
        return 0
