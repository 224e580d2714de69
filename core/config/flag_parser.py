"""The argument parser of frame's command line.

Underscores in flags count as dashes, settings that are mappings take dotted keys (`--hf-overrides.a.b 1`),
`--help=GROUP` shows the flags of a group, and a misspelt flag is refused with the names near it. Knows no setting.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from .errors import ConfigError, near
from .mappings import merge, put

N = TypeVar("N")


class FlagParser(argparse.ArgumentParser):
    """A parser to which the caller adds flags.

    `mappings` holds the destinations that take dotted keys, and how to read the value of a key. `short_names` maps
    short flags to such destinations. `show_help` returns the text for `--help=NAME`.
    """

    def __init__(self, *, prog: str | None = None, description: str | None = None, add_help: bool = True) -> None:
        super().__init__(
            prog=prog,
            description=description,
            add_help=add_help,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.mappings: dict[str, Callable[[str], Any]] = {}
        self.short_names: dict[str, str] = {}
        self.show_help: Callable[[str], str] | None = None

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Like argparse, but also reads dotted keys, flags with underscores, and `--help=NAME`."""
        import sys

        try:
            plain, dotted = self._take_dotted([_dashes(item) for item in (sys.argv[1:] if args is None else args)])
            found, rest = super().parse_known_args(plain, namespace)
            for name, value in dotted.items():
                setattr(found, name, merge(getattr(found, name, None) or {}, value))
        except ConfigError as error:
            self.error(str(error))
        return found, rest

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Like argparse, but ends the process with one sentence for an unknown argument."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            if not name.startswith("-"):
                self.error(f"unexpected argument {rest[0]!r}")
            self.error(f"no flag {name!r}{near(name, self._option_string_actions)}")
        return found

    def error(self, message: str) -> NoReturn:
        """Prints one sentence and exits with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")

    def _take_dotted(self, args: list[str]) -> tuple[list[str], Mapping[str, dict[str, Any]]]:
        plain: list[str] = []
        dotted: dict[str, dict[str, Any]] = {}
        items = iter(range(len(args)))
        for index in items:
            item = args[index]
            name, equals, value = item.partition("=")
            if self.show_help is not None and equals and name in ("--help", "-h"):
                print(self.show_help(value), end="")
                self.exit(0)
            first, dot, path = name.removeprefix("--").partition(".")
            own = self.short_names.get(first, first.replace("-", "_") if name.startswith("--") else "")
            if not (dot and own in self.mappings):
                plain.append(item)
                continue
            if not equals:
                following = args[index + 1 : index + 2]
                if following and not following[0].startswith("--"):
                    value = following[0]
                    next(items)
                else:
                    value = "true"
            parts = path.split(".")
            keep = 1 if own == "plugin" else 0  # a plugin's name is as its package wrote it
            keys = parts[:keep] + [part.replace("-", "_") for part in parts[keep:]]
            if not all(part.rstrip("+") for part in parts) or len(parts) <= keep:
                raise ConfigError(f"{name}: write --{first}.{'NAME.FIELD' if keep else 'KEY'} VALUE")
            put(dotted.setdefault(own, {}), keys, self.mappings[own](value))
        return plain, dotted


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
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value


def _dashes(item: str) -> str:
    """`--max_model_len=x` → `--max-model-len=x`; dotted keys and values stay as they are."""
    if not item.startswith("--"):
        return item
    name, equals, value = item.partition("=")
    head, dot, tail = name.partition(".")
    return head.replace("_", "-") + dot + tail + equals + value
