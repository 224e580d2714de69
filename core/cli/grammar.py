"""`frame grammar FD`: a process that tries grammars, started by an engine; the descriptor is its socket to it."""

from __future__ import annotations

import argparse
from typing import Any, cast

from ..config.tree import FrameConfig
from ..interfaces.endpoint import Command
from ..interfaces.grammar import GrammarBackend


class GrammarCommand(Command):
    """Tries grammars until its socket closes."""

    help = "Internal: a process that tries grammars, started by an engine."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the inherited socket."""
        parser.add_argument("descriptor", type=int, help="File descriptor of an inherited socket.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until the engine hangs up."""
        from ..engine.grammar.trial import serve_trials
        from ..processes.child_process import die_with_parent

        die_with_parent()
        return serve_trials(arguments.descriptor, _build)


def _build(config: FrameConfig, choices: list[Any]) -> GrammarBackend:
    from ..config.checkpoint import read_checkpoint
    from ..front.vocabulary import read_vocabulary
    from ..plugin_host.registry import Registry
    from ..plugin_host.setups import grammar_setup

    registry = Registry.load(choices)
    provider = registry.select("grammar", config.structured_outputs.structured_outputs_backend, lambda _: None)
    vocabulary = read_vocabulary(config, read_checkpoint(config))
    return cast("GrammarBackend", registry.make("grammar", provider, grammar_setup(config, vocabulary), config))
