"""`frame complete`: continuations of text by a running server in the terminal."""

from __future__ import annotations

import argparse
import sys

from frame.interfaces import Command

from .terminal import INTERRUPTED, TerminalClient, TerminalError, add_client_arguments, show, typed_lines


class CompleteCommand(Command):
    """Continues each line of input by itself; the end of input or ctrl-C at the prompt ends the command."""

    help = "Have a running server continue a text."
    examples = ('frame complete -q "The sea is" --max-tokens 20',)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The server and the one-shot text."""
        add_client_arguments(parser)
        parser.add_argument("-q", "--quick", metavar="TEXT", help="Continue one text, print the continuation and exit.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Returns 1 when there is no server or it refuses, 130 when ctrl-C ends the one text."""
        try:
            client = TerminalClient(arguments)
            if arguments.quick is not None:
                return 0 if show(client.complete(arguments.quick))[1] else INTERRUPTED
            for prompt in typed_lines(f"Continuing text with {client.model}; end of input (ctrl-D) quits."):
                if prompt:
                    show(client.complete(prompt))
            return 0
        except TerminalError as error:
            print(f"frame: {error}", file=sys.stderr)
            return 1
