"""The argument parser of one `frame bench` subcommand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from frame.quoting import cut_quotes, quoted
from frame.settings import FlagParser, near


class SubcommandParser(FlagParser):
    """Refuses an unknown flag in a sentence that names the subcommand and the most similar one of its flags.

    With `shares` the words after `--` are not parsed but kept as `shared`.
    """

    shares = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        own = words.index("--") if self.shares and "--" in words else len(words)
        found, rest = super().parse_known_args(words[:own], namespace)
        if self.shares:
            found.shared = words[own + 1 :]
        if rest:
            name = rest[0].partition("=")[0]
            if not name.startswith("-"):
                self.error(f"unexpected argument {quoted(rest[0])}")
            self.error(f"no flag {quoted(name)}{near(name, self._option_string_actions)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Prints one sentence and exits with status 2."""
        self.exit(2, f"{self.prog}: {cut_quotes(message)}\n")
