"""`frame plugins`: what is installed, what of it can be used, and why the rest cannot; and the contract check."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from frame.interfaces import Command
from frame.quoting import quoted
from frame.settings import KINDS, PluginError, Registry, near

#: Kinds of which a class says by itself whether it can be used, and those that are loaded without being named.
_TRIED = ("platform", "grammar", "processor", "endpoint", "command")


@dataclass(frozen=True)
class Row:
    """One line of the table; `why` is the reason where `status` is "failed" or "unusable".

    `status` is "failed" (the plugin cannot be chosen), "unusable" (it can be chosen, but not on this machine), "usable"
    (this machine has what it needs), or "loaded" (only the start of an engine will show whether it can be used).
    """

    kind: str
    name: str
    package: str
    version: str
    api: str
    status: str
    why: str
    summary: str = ""
    target: str = ""


class PluginsCommand(Command):
    """Lists plugins, or runs the contract suite of their kind against one."""

    help = "List installed plugins, or check one: frame plugins check NAME."
    examples = (
        "frame plugins --kind attention",
        "frame plugins check my-plugin",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares `[check NAME]`, and what is listed or printed."""
        parser.add_argument(
            "action",
            nargs="?",
            choices=("list", "check"),
            default="list",
            help="List the plugins (default), or check one.",
        )
        parser.add_argument("name", nargs="?", metavar="NAME", help="The plugin to check: NAME or PACKAGE:NAME.")
        parser.add_argument("--kind", choices=tuple(KINDS), help="Only plugins of this kind.")
        parser.add_argument("--json", action="store_true", help="Print the table as JSON.")
        parser.add_argument(
            "--quick",
            action="store_true",
            help="Import no plugin's class; nothing then says which this machine can use.",
        )
        parser.add_argument(
            "-v", "--verbose", action="store_true", help="With check: print also what passed or was skipped."
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Prints the table, or checks; status 1 when the check fails."""
        registry = Registry.load()
        if arguments.action == "check":
            return check(registry, arguments.name, arguments.kind, verbose=arguments.verbose)
        rows = [row for row in table(registry) if arguments.kind in (None, row.kind)]
        rows = rows if arguments.quick else _with_trials(rows)
        print(json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else _text(rows))
        return 0


def table(registry: Registry) -> list[Row]:
    """Every provider and every package that failed, by kind and name."""
    order = list(KINDS)
    offers = sorted(registry.offers, key=lambda offer: (order.index(offer.kind), offer.provider.name, offer.package))
    rows = []
    for offer in offers:
        own, why = offer.provider, offer.problem or ""
        status = "failed" if why else "loaded"
        rows.append(
            Row(offer.kind, own.name, offer.package, offer.version, own.api, status, why, own.summary, own.target)
        )
    return rows + [
        Row("-", one.entry, one.package, one.version, "-", "failed", one.reason) for one in registry.failures
    ]


def check(registry: Registry, name: str | None, kind: str | None = None, *, verbose: bool = False) -> int:
    """Runs the contract suite of each kind in which a plugin is called `name`; 0 when all of it passes.

    Prints a line for each kind, and each check that fails; `verbose`: every check, and why some were skipped.
    """
    if name is None:
        raise PluginError("frame plugins check needs the NAME of a plugin")
    package, _, bare = name.rpartition(":")
    named = [offer for offer in registry.offers if offer.provider.name == bare and package in ("", offer.package)]
    kinds = [other for other in KINDS if kind in (None, other) and any(offer.kind == other for offer in named)]
    if not kinds:
        if kind is not None:
            registry.choose(kind, name)  # raises with the names that there are
        known = {offer.provider.name for offer in registry.offers}
        if Path(name).is_dir():
            is_package = any((Path(name) / file).is_file() for file in ("pyproject.toml", "setup.py", "setup.cfg"))
            remedy = f"pip install {name}" if is_package else "it needs a pyproject.toml with an entry point of frame"
            raise PluginError(f"{quoted(name)} is a folder, not the NAME of an installed plugin; {remedy}")
        raise PluginError(f"no plugin {quoted(name)}{near(bare, known)}; `frame plugins` lists them")
    return max(_run_suite(other, f"{registry.offer(other, name).package}:{bare}", verbose=verbose) for other in kinds)


def _run_suite(kind: str, plugin: str, *, verbose: bool) -> int:
    try:
        from frame.testing.contract_run import print_check
    except ImportError as error:
        raise PluginError(
            f"frame plugins check needs pytest ({error}); `pip install 'frame-llm[test]'` brings it"
        ) from None
    return print_check(kind, plugin, KINDS[kind].noun, verbose=verbose)


def _with_trials(rows: list[Row]) -> list[Row]:
    """Asks a child process, which may import what this one must not (torch), and returns the rows with its answers."""
    keys = [[row.kind, f"{row.package}:{row.name}"] for row in rows if row.status == "loaded" and row.kind in _TRIED]
    if not keys:
        return rows
    done = subprocess.run(
        [sys.executable, "-P", "-m", "frame.plugins.commands.plugin_trial", json.dumps(keys)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout.strip() else {}
    return [
        replace(row, status="unusable" if answer else "usable", why=answer)
        if (answer := found.get(f"{row.kind} {row.package}:{row.name}")) is not None
        else row
        for row in rows
    ]


def _text(rows: list[Row]) -> str:
    head = ("KIND", "NAME", "PACKAGE", "VERSION", "API", "STATUS", "")
    lines = [head] + [
        (row.kind, row.name, row.package, row.version, row.api, row.status, row.why or row.summary) for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [[f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
