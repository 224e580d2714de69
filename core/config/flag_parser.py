"""The argument parser of frame's command line.

Underscores in flags count as dashes, settings that are mappings take dotted keys (`--hf-overrides.a.b 1`),
`--help=GROUP` shows the flags of a group, and a misspelt flag is refused with the names near it.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import BooleanOptionalAction
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NoReturn

from frame.quoting import cut_quotes, quoted, shortened

from .errors import ConfigError, near
from .mappings import merge, put


class FlagParser(argparse.ArgumentParser):
    """A parser to which the caller adds flags.

    `mappings` holds the destinations that take dotted keys, and how to read the value of a key. `short_names` maps
    short flags to such destinations. `show_help` returns the text for `--help=NAME`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.mappings: dict[str, Callable[[str], Any]] = {}
        self.short_names: dict[str, str] = {}
        self.show_help: Callable[[str], str] | None = None
        self._after_switches: dict[str, str] = {}

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Like argparse, but also reads dotted keys, flags with underscores, and `--help=NAME`."""
        items = [_dashes(item) for item in (sys.argv[1:] if args is None else args)]
        named = next((item for item in items if item.startswith(("--help=", "-h="))), None)
        try:
            if self.show_help is not None and named is not None:
                print(self.show_help(named.partition("=")[2]), end="")
                self.exit(0)
            for item, after in zip_longest(items, items[1:], fillvalue=""):
                flag, equals, given = item.partition("=")
                if flag in self._switches and (equals or after.lower() in ("true", "false")):
                    raise ConfigError(self._no_value(flag, given if equals else after))
            plain, dotted = self._take_dotted(items)
            found, rest = super().parse_known_args(plain, namespace)
            self._after_switches |= {after: flag for flag, after in pairwise(items) if flag in self._switches}
            for name, value in dotted.items():
                setattr(found, name, merge(getattr(found, name, None) or {}, value))
        except ConfigError as error:
            self.error(str(error))
        return found, rest

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Like argparse, but ends the process with one sentence for an unknown argument."""
        found, rest = self.parse_known_args(args, namespace)
        if rest and not rest[0].startswith("-") and self._subparsers is None:  # argparse ends positionals at a flag
            found, rest = self.parse_known_intermixed_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            if not name.startswith("-"):
                if rest[0] in self._after_switches:
                    self.error(self._no_value(self._after_switches[rest[0]], rest[0]))
                end = f"{doubt(self, found)}; {self.prog} --help shows what goes where"
                self.error(f"unexpected argument {quoted(rest[0])}{end}")
            self.error(
                f"no flag {quoted(name)}{near(name, self._option_string_actions)}; {self.prog} --help lists them"
            )
        return found

    @property
    def _switches(self) -> dict[str, Sequence[str]]:
        """By flag that takes no value: those with which its setting is written."""
        flags = self._option_string_actions
        return {name: one.option_strings for name, one in flags.items() if isinstance(one, BooleanOptionalAction)}

    def _no_value(self, flag: str, value: str) -> str:
        return f"{flag} takes no value, got {quoted(value)}; write {' or '.join(self._switches[flag])}"

    def error(self, message: str) -> NoReturn:
        """Prints one sentence and exits with status 2."""
        self.exit(2, f"{self.prog}: {cut_quotes(message)}\n")

    def _take_dotted(self, args: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """Returns the arguments without those that set keys of mappings, and the mappings that these make."""
        plain: list[str] = []
        dotted: dict[str, dict[str, Any]] = {}
        items = deque(args)
        while items:
            item = items.popleft()
            name, equals, value = item.partition("=")
            first, dot, path = name.removeprefix("--").partition(".")
            own = self.short_names.get(first, first.replace("-", "_") if name.startswith("--") else "")
            if not (dot and own in self.mappings):
                plain.append(item)
                continue
            if not equals:
                value = items.popleft() if items and not items[0].startswith("--") else "true"
            keys = path.split(".")
            keep = 1 if own == "plugin" else 0  # a plugin's name is as its package wrote it
            if not all(key.rstrip("+") for key in keys) or len(keys) <= keep:
                raise ConfigError(f"{shortened(name)}: write --{first}.{'NAME.FIELD' if keep else 'KEY'} VALUE")
            keys[keep:] = [key.replace("-", "_") for key in keys[keep:]]
            put(dotted.setdefault(own, {}), keys, self.mappings[own](value))
        return plain, dotted


def doubt(parser: FlagParser, found: Any, about: str = "") -> str:
    """Returns the end of an error where a word that was taken for a positional may be meant for the switch before it.

    "" where there is no such word, or an error that says `about` does not name it.
    """
    for one in parser._get_positional_actions():
        word = getattr(found, one.dest, None)
        if isinstance(word, str) and word in parser._after_switches and (not about or quoted(word) in about):
            flag = parser._after_switches[word]
            ways = " or ".join(parser._switches[flag])
            return f"; {quoted(word)} was taken for {one.metavar}: {flag} takes no value, write {ways}"
    return ""


def read_json(text: str) -> Any:
    """Reads a dotted key's value: as JSON if it is any (numbers, true, null, lists), else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def read_option(text: str) -> Any:
    """Reads a plugin option's value: lists and objects as JSON, others as text, which the plugin's types convert."""
    return read_json(text) if text[:1] in ("[", "{") else text


def read_mapping(text: str) -> dict[str, Any]:
    """Reads a JSON object; raises `argparse.ArgumentTypeError` for anything else."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{quoted(text)} must be a JSON object")
    return value


def _dashes(item: str) -> str:
    """`--max_model_len=x` → `--max-model-len=x`; dotted keys and values stay as they are."""
    if not item.startswith("--"):
        return item
    name, equals, value = item.partition("=")
    head, dot, tail = name.partition(".")
    return head.replace("_", "-") + dot + tail + equals + value
