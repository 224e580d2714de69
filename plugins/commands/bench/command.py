"""`frame bench SUBCOMMAND`: runs the subcommand's class, which is imported when its flags are needed."""

from __future__ import annotations

import argparse
from importlib import import_module

from frame.interfaces import Command, Setup
from frame.settings import ConfigError

from .output import check_outputs
from .subcommand_parser import SubcommandParser

_SUBCOMMANDS = {
    "serve": "serve:ServeBench",
    "latency": "latency:LatencyBench",
    "throughput": "throughput:ThroughputBench",
    "startup": "startup:StartupBench",
    "kernels": "kernels:KernelsBench",
    "sweep": "sweep:SweepBench",
    "route": "route:RouteBench",
}


class BenchCommand(Command):
    """Results have the field names of `vllm bench`, so that results of frame and of vLLM can be compared."""

    help = "Measure a server or an engine: frame bench serve|latency|throughput|startup|kernels|sweep|route."
    examples = (
        "frame bench serve --base-url http://127.0.0.1:8000 --num-prompts 200 --request-rate 8 --html report.html",
        "frame bench throughput /models/qwen3 --input-len 512 --output-len 128 --num-prompts 500",
        "frame bench sweep serve --vary max-concurrency=1,4,16,64 --html pareto.html -- --num-prompts 200",
        "frame bench serve --help",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """A parser for each subcommand."""
        made = parser.add_subparsers(
            dest="bench", metavar="SUBCOMMAND", parser_class=SubcommandParser, title="subcommands"
        )
        for name in _SUBCOMMANDS:
            command = subcommand(name, self.setup)
            own = made.add_parser(name, help=command.help, description=command.help)
            command.add_arguments(own)
            examples = "examples:\n" + "\n".join(f"  {line}" for line in command.examples)
            own.epilog = "\n\n".join(filter(None, (examples, own.epilog)))

    def run(self, arguments: argparse.Namespace) -> int:
        """The subcommand's exit status; raises `ConfigError` without one, and where its files could not be written."""
        if arguments.bench is None:
            raise ConfigError(f"frame bench needs a SUBCOMMAND; there are: {', '.join(_SUBCOMMANDS)}")
        check_outputs(arguments)
        return subcommand(arguments.bench, self.setup).run(arguments)


def subcommand(name: str, setup: Setup) -> Command:
    """The subcommand `name`, built."""
    module, _, kind = _SUBCOMMANDS[name].partition(":")
    command: Command = getattr(import_module(f".{module}", __package__), kind)(setup)
    return command
