"""Asks advisory services about the pinned packages, through pip-audit; ends with what is known and for how many.

Exit status: 0 nothing known (or, said plainly, no service answered), 1 a pinned version has an advisory, 2 no audit
could be made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SERVICES = ("pypi", "osv")
#: what pip-audit's output names when it reached nobody
_UNREACHED = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "ProxyError", "SSLError", "ServiceError", "Retry")
CLEAN, FOUND, FAILED = 0, 1, 2


class Answer(NamedTuple):
    """What one service says: its packages, or why it says nothing; `failed` when it never was asked."""

    packages: list[dict[str, Any]]
    problem: str = ""
    failed: bool = False

    @property
    def known(self) -> list[dict[str, Any]]:
        """The packages that the service knows."""
        return [package for package in self.packages if "skip_reason" not in package]


def ask(tool: str, service: str, pins: Path, seconds: float) -> Answer:
    """Runs pip-audit once."""
    command = [tool, "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--timeout", "10"]
    command += ["--vulnerability-service", service, "--requirement", str(pins)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Answer([], f"no answer within {seconds:g} seconds")
    except OSError as error:
        return Answer([], f"{tool} cannot be run: {error.strerror}", failed=True)
    try:
        return Answer(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError, TypeError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Answer([], said[:300], failed=not any(name in done.stderr for name in _UNREACHED))


def advisories(packages: list[dict[str, Any]]) -> list[str]:
    """One line for each known vulnerability."""
    return [
        f"{package['name']} {package['version']}: {found['id']}, mended in {', '.join(found['fix_versions']) or 'none'}"
        for package in packages
        for found in package.get("vulns", ())
    ]


def main(words: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pip-audit", default="pip-audit")
    parser.add_argument("--seconds", type=float, default=120, help="for each service")
    parser.add_argument("pins", type=Path)
    arguments = parser.parse_args(words)
    for service in SERVICES:
        answer = ask(arguments.pip_audit, service, arguments.pins, arguments.seconds)
        if answer.failed:
            print(f"audit: {answer.problem}", file=sys.stderr)
            return FAILED
        if not answer.known:
            print(f"audit: {service}: {answer.problem or 'knows none of the packages'}")
            continue
        lines = advisories(answer.known)
        unknown = len(answer.packages) - len(answer.known)
        print(*lines, sep="\n", end="\n" if lines else "")
        print(
            f"audit: {service}: {len(lines)} advisories for {len(answer.known)} packages; {unknown} are unknown to it"
        )
        return FOUND if lines else CLEAN
    print("audit: no advisory service answered, so nothing was audited")
    return CLEAN


if __name__ == "__main__":
    sys.exit(main())
