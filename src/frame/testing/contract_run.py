"""Runs a contract suite against one plugin and reports the outcome of each check."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

#: Most characters of a line that gives the reason of an outcome.
_WIDTH = 100
_CASE = '''"""Written by `frame plugins check`."""

from frame.testing.suites import suite_for


class TestContract(suite_for({kind!r}, **{given!r})):
    {attributes}
'''


@dataclass(frozen=True)
class Outcome:
    """One check: its name in words, its outcome, and the reason when it did not pass."""

    name: str
    case: str
    status: Literal["passed", "failed", "skipped"]
    reason: str = ""


class _Collector:
    """A pytest plugin that keeps reports."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for set-up, call and tear-down of every test."""
        if report.when == "call" or not report.passed:
            test, _, case = report.nodeid.rpartition("::")[2].partition("[")
            words = test.removeprefix("test_").replace("_", " ")
            self.outcomes.append(Outcome(words, case.removesuffix("]"), report.outcome, _reason(report)))

    def pytest_collectreport(self, report: Any) -> None:
        """Counts a suite that cannot be collected as a failure."""
        if report.failed:
            self.outcomes.append(Outcome("the suite can be collected", "", "failed", str(report.longrepr)[-500:]))


def _reason(report: Any) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line for line in text.splitlines() if line.strip()]
    said = " ".join(lines[:3])
    if crash is not None and not re.match(r"(AssertionError|Failed|assert)\b", said):  # no sentence of a check
        return f"{said} ({Path(crash.path).name}, line {crash.lineno})"
    return re.sub(r"^(AssertionError|Failed): ", "", said)


def run_suite(kind: str, *, only: str = "", **attributes: Any) -> list[Outcome]:
    """Runs the suite of a kind with these class attributes (`plugin="package:name"`, …), in this process, silently.

    `only` is the name of one check, in words.
    """
    lines = "\n    ".join(f"{name} = {value!r}" for name, value in attributes.items())
    collector = _Collector()
    with tempfile.TemporaryDirectory() as folder:
        # a name of its own: a module that was imported once is not imported again
        case, settings = Path(folder, f"test_contract_{secrets.token_hex(8)}.py"), Path(folder, "pytest.ini")
        case.write_text(_CASE.format(kind=kind, given=attributes, attributes=lines))
        settings.write_text("[pytest]\n")
        options = ["-c", str(settings), "--rootdir", folder, f"--basetemp={folder}/scratch", "--import-mode=importlib"]
        off = ["--disable-plugin-autoload", "-pno:terminal", "-pno:cacheprovider", "-pno:warnings"]
        chosen = ["-k", "test_" + only.replace(" ", "_")] if only else []
        added = os.environ.pop("PYTEST_ADDOPTS", None)  # the caller's own, which may name plugins that are off here
        try:
            status = pytest.main([*options, *off, *chosen, str(case)], plugins=[collector])
        finally:
            if added is not None:
                os.environ["PYTEST_ADDOPTS"] = added
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and all(
        outcome.status != "failed" for outcome in collector.outcomes
    ):
        collector.outcomes.append(Outcome("the suite can be run", "", "failed", f"pytest ended with {status!r}"))
    return collector.outcomes


def summary(outcomes: list[Outcome]) -> Mapping[str, list[Outcome]]:
    """Outcomes by check, in the order of the suite."""
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.name, []).append(outcome)
    return grouped


def print_check(kind: str, plugin: str, noun: str, *, verbose: bool) -> int:
    """Runs the suite of a kind, called `noun`, against a plugin; 0 when all of it passes.

    Prints one line for the kind, and each check that fails; `verbose`: every check, and why some were skipped.
    """
    print(f"{noun} {plugin}: ", end="", flush=True)
    outcomes = run_suite(kind, plugin=plugin)
    counts = {status: sum(case.status == status for case in outcomes) for status in ("passed", "failed", "skipped")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no check ran"
    hint = " (-v says why)" if counts["skipped"] and not verbose else ""
    print(f"{told}{hint}", flush=True)
    last = ""
    for name, cases in summary(outcomes).items():
        failed = [case for case in cases if case.status == "failed"]
        if not failed and not verbose:
            continue
        skipped = [case for case in cases if case.status == "skipped"]
        status = "FAIL" if failed else "skip" if len(skipped) == len(cases) else "pass"
        count = f" ({len(cases) - len(skipped)} of {len(cases)} cases)" if skipped and status != "skip" else ""
        print(f"  {status}  {name}{count}")
        for case in failed[:3] or (skipped[:1] if status == "skip" and skipped[0].reason != last else ()):
            last = case.reason
            where = f"[{case.case}] " if case.case else ""
            print(textwrap.indent("\n".join(textwrap.wrap(where + case.reason, _WIDTH)), " " * 8))
    return int(counts["failed"] > 0 or not outcomes)
