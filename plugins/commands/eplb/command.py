"""`frame eplb simulate TRACE`: replays recorded expert loads over balancers, ranks, nodes and redundant experts."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.interfaces import Command
from frame.quoting import quoted
from frame.settings import ConfigError, from_flat

from ..bench.output import check_outputs
from ..bench.subcommand_parser import SubcommandParser

if TYPE_CHECKING:
    from frame.interfaces import LoadTrace

    from .replay import Case

_MAX_CASES = 256


class EplbCommand(Command):
    """Prints balance, copied experts and bytes of each case, and writes them as JSON and as a page with plots."""

    help = "Replay recorded expert loads over balancers and numbers of ranks: frame eplb simulate TRACE."
    examples = (
        "frame eplb simulate loads.jsonl --ranks 32,64 --redundant 32",
        "frame eplb simulate loads.jsonl --policies sticky --option sticky.windows=10 --html balance.html",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares `simulate` and its cases."""
        made = parser.add_subparsers(
            dest="eplb", metavar="SUBCOMMAND", parser_class=SubcommandParser, title="subcommands"
        )
        text = (
            "Replay recorded expert loads over balancers, ranks, nodes and redundant experts; every combination is run."
        )
        own = made.add_parser("simulate", help=text, description=text)
        add = own.add_argument
        add("trace", metavar="TRACE", help="File of recorded loads (JSON lines; see the page on expert balance).")
        add(
            "--policies",
            default="none,hierarchical,sticky",
            metavar="NAMES",
            help="Balancer plugins, and none for experts that never move (default: %(default)s).",
        )
        add("--ranks", default="32", metavar="N,…", help="Ranks that share the experts (default: %(default)s).")
        add("--nodes", default="1", metavar="N,…", help="Nodes that the ranks are on (default: %(default)s).")
        add("--redundant", default="0", metavar="N,…", help="Slots beyond one for each expert (default: %(default)s).")
        add("--interval", type=int, default=1, metavar="N", help="Records between two placements (default: 1).")
        add("--expert-bytes", type=int, metavar="N", help="Weights of one expert; default: as the trace says.")
        add(
            "--option",
            action="append",
            default=[],
            metavar="NAME.FIELD=VALUE",
            help="An option of a balancer; may be repeated.",
        )
        add("--output-json", metavar="FILE", help="Write the results as JSON.")
        add("--html", metavar="FILE", help="Write the results with plots as one HTML file.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Replays, prints and writes; raises `ConfigError` and `PluginError`."""
        if arguments.eplb is None:
            raise ConfigError("frame eplb needs a SUBCOMMAND; there is: simulate")
        check_outputs(argparse.Namespace(output_json=arguments.output_json, html=arguments.html))
        from frame.interfaces import LoadTrace

        from .replay import replay
        from .tables import write

        try:
            trace = LoadTrace(Path(arguments.trace))
            results = replay(trace, _cases(arguments, trace), arguments.interval)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        write(results, trace.header, arguments.output_json, arguments.html)
        return 0


def _cases(arguments: argparse.Namespace, trace: LoadTrace) -> list[Case]:
    from frame.interfaces import FixedPlacement, Setup, SlotShape
    from frame.settings import Registry

    from .replay import Case

    header, registry = trace.header, Registry.load()
    expert_bytes = header.expert_bytes if arguments.expert_bytes is None else arguments.expert_bytes
    if expert_bytes < 0 or arguments.interval < 1:
        raise ConfigError("--interval must be at least 1, and --expert-bytes at least 0")
    names = [name.strip() for name in arguments.policies.split(",") if name.strip()]
    sizes = [_counts(arguments, flag) for flag in ("ranks", "nodes", "redundant")]
    count = len(names) * len(sizes[0]) * len(sizes[1]) * len(sizes[2])
    if not 0 < count <= _MAX_CASES:
        raise ConfigError(
            f"policies, ranks, nodes and redundant give {count} combinations, at most {_MAX_CASES} are run"
        )
    config = from_flat({"plugin": _options(arguments.option)})
    cases = []
    for ranks, nodes, redundant in product(*sizes):
        shape = SlotShape(
            num_slots=header.num_experts + redundant,
            num_ranks=ranks,
            num_nodes=nodes,
            num_groups=header.num_groups,
            expert_bytes=expert_bytes,
        )
        if problems := shape.problems(header.num_experts):
            raise ConfigError(f"--ranks {ranks} --nodes {nodes} --redundant {redundant}: {'; '.join(problems)}")
        for name in names:
            balancer = FixedPlacement(Setup()) if name == "none" else registry.make("balancer", name, Setup(), config)
            cases.append(Case(name, balancer, shape))
    return cases


def _counts(arguments: argparse.Namespace, flag: str) -> list[int]:
    least, text = (0 if flag == "redundant" else 1), getattr(arguments, flag)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and least <= int(part[:9]) and len(part) < 9 for part in parts):
        raise ConfigError(f"--{flag} must be whole numbers from {least} on, as in 32,64, got {quoted(text)}")
    return [int(part) for part in parts]


def _options(given: list[str]) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {}
    for text in given:
        path, equals, value = text.partition("=")
        name, dot, field = path.rpartition(".")
        if not (equals and dot and name and field):
            raise ConfigError(f"--option must be NAME.FIELD=VALUE, as in sticky.windows=10, got {quoted(text)}")
        options.setdefault(name, {})[field] = value
    return options
