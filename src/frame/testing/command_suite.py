"""The contract of commands."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from frame.core.config.flag_parser import FlagParser
from frame.core.interfaces.endpoint import Command

from .plugin_suite import PluginSuite
from .setups import make_setup

_HEAVY = ("torch", "transformers", "fastapi", "triton")
_LIGHT = f"""
import importlib, sys
from frame.core.config.flag_parser import FlagParser
from frame.interfaces import Setup
module, _, name = sys.argv[1].partition(":")
command = getattr(importlib.import_module(module), name)(Setup())
command.add_arguments(FlagParser())
print(*sorted(set({_HEAVY!r}) & set(sys.modules)))
"""


class CommandSuite(PluginSuite):
    """The contract of `frame.interfaces.Command`.

        class TestGreet(CommandSuite):
            plugin = "greet"                 # the installed name
            arguments = ["--name", "you"]    # what to run it with; left out, it is not run

    A command is light until `run`: `frame --help` builds every one.
    """

    kind = "command"
    arguments: ClassVar[Sequence[str] | None] = None
    status: ClassVar[int] = 0

    def command(self) -> Command:
        """Built as the command line does: without configuration."""
        made = self.registry().make(self.kind, self.name, make_setup(self.kind))
        assert isinstance(made, Command), f"{type(made).__name__} does not derive from Command"
        return made

    def parser(self, command: Command) -> argparse.ArgumentParser:
        """A parser of the command line's kind that the command has declared its arguments to."""
        parser = FlagParser(prog=f"frame {self.bare_name}", description=command.help)
        command.add_arguments(parser)
        return parser

    def test_help_is_one_line(self) -> None:
        text = self.command().help
        assert isinstance(text, str), f"help must be text, is {text!r}"
        assert text.strip(), "help is empty"
        assert "\n" not in text.strip(), "help must be one line"

    def test_arguments_can_be_declared_twice(self) -> None:
        command = self.command()
        assert self.parser(command).format_help() == self.parser(command).format_help()
        assert self.parser(self.command()).format_help() == self.parser(command).format_help()

    def test_nothing_heavy_is_imported_before_run(self) -> None:
        target = self.provider().target
        done = subprocess.run([sys.executable, "-c", _LIGHT, target], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{target} cannot be built in a process of its own: {done.stderr.strip()}"
        found = done.stdout.strip()
        assert not found, f"building it imports {found}; import heavy things inside run()"

    def test_it_shows_its_help_and_is_listed(self) -> None:
        if not self.plugin:
            pytest.skip("only an installed command is listed")
        done = self.frame(self.name, "--help")
        assert done.returncode == 0, f"`frame {self.name} --help` ended with {done.returncode}: {done.stderr.strip()}"
        assert self.bare_name in self.frame("--help").stdout, f"`frame --help` does not list {self.bare_name}"

    def test_wrong_arguments_end_with_status_2(self) -> None:
        with pytest.raises(SystemExit) as end:
            self.parser(self.command()).parse_args(["--no-such-argument-of-this-command"])
        assert end.value.code == 2, f"a wrong argument ended with {end.value.code!r}"

    def test_it_runs(self) -> None:
        if self.arguments is None:
            pytest.skip("set `arguments` to run the command")
        command = self.command()
        status: Any = command.run(self.parser(command).parse_args(list(self.arguments)))
        assert status == self.status, f"run() gave {status!r}, expected the exit status {self.status}"

    @staticmethod
    def frame(*arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `frame …` in a process of its own."""
        command = [sys.executable, "-m", "frame", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)
