"""`frame plugins`: what is installed, what of it can be used, and why the rest cannot; and the contract check."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ..interfaces.endpoint import Command
from ..offers import KINDS, Failure, Offer, PluginError
from ..registry import Registry

_CASE = '''"""Written by `frame plugins check`."""

from frame.core.testing.suites import SUITES


class TestContract(SUITES[{kind!r}]):
    plugin = {plugin!r}
'''


@dataclass(frozen=True)
class Row:
    """One line of the table. `status` is "loaded" or "failed", `why` the reason for the latter."""

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

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares `[check NAME]` and `--json`."""
        parser.add_argument("action", nargs="?", choices=("list", "check"), default="list", help="Default: list.")
        parser.add_argument("name", nargs="?", metavar="NAME", help="The plugin to check: NAME or PACKAGE:NAME.")
        parser.add_argument("--kind", choices=tuple(KINDS), help="Only plugins of this kind.")
        parser.add_argument("--json", action="store_true", help="Print the table as JSON.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Prints the table, or checks; status 1 when the check fails."""
        registry = Registry.load()
        if arguments.action == "check":
            return check(registry, arguments.name, arguments.kind)
        rows = [row for row in table(registry) if arguments.kind in (None, row.kind)]
        print(json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else _text(rows))
        return 0


def table(registry: Registry) -> list[Row]:
    """Every provider and every package that failed, by kind and name."""
    order = list(KINDS)
    offers = sorted(registry.offers, key=lambda offer: (order.index(offer.kind), offer.provider.name, offer.package))
    return [_row(offer) for offer in offers] + [_failed(failure) for failure in registry.failures]


def check(registry: Registry, name: str | None, kind: str | None = None) -> int:
    """Runs the contract suite of each kind in which a plugin is called `name`; 0 when all of it passes."""
    if name is None:
        raise PluginError("frame plugins check needs the NAME of a plugin")
    bare = name.rpartition(":")[2]
    kinds = [
        other
        for other in KINDS
        if kind in (None, other) and any(o.kind == other and bare == o.provider.name for o in registry.offers)
    ]
    if not kinds:
        registry.choose(kind or "platform", name)  # raises with the names that there are
        raise PluginError(f"no plugin {name!r}; `frame plugins` lists them")
    return max(_run_suite(other, f"{registry.offer(other, name).package}:{bare}") for other in kinds)


def _run_suite(kind: str, plugin: str) -> int:
    from ..testing.suites import SUITES

    try:
        import pytest
    except ImportError:
        raise PluginError("frame plugins check needs pytest; install frame-llm[test]") from None
    if kind not in SUITES:
        raise PluginError(
            f"there is no contract suite for a {KINDS[kind].noun}; there are: {', '.join(SUITES) or 'none'}"
        )
    print(f"{KINDS[kind].noun} {plugin}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder, "test_contract.py")
        case.write_text(_CASE.format(kind=kind, plugin=plugin))
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        options = ["-c", str(settings), "--rootdir", folder, "-p", "no:cacheprovider", "--import-mode=importlib", "-q"]
        return int(pytest.main([*options, str(case)]) != 0)


def _row(offer: Offer) -> Row:
    provider = offer.provider
    status = "loaded" if offer.problem is None else "failed"
    return Row(
        offer.kind, provider.name, offer.package, offer.version, provider.api, status, offer.problem or "",
        provider.summary, provider.target,
    )  # fmt: skip


def _failed(failure: Failure) -> Row:
    return Row("-", failure.entry, failure.package, failure.version, "-", "failed", failure.reason)


def _text(rows: list[Row]) -> str:
    head = ("KIND", "NAME", "PACKAGE", "VERSION", "API", "STATUS", "")
    lines = [head] + [
        (row.kind, row.name, row.package, row.version, row.api, row.status, row.why or row.summary) for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [[f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
