"""Makes command-line flags from the tree, their help by group, and a configuration from parsed arguments.

Flags override the configuration file, which overrides the defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from frame.quoting import quoted
from frame.vllm_names.arguments import SHORT_FLAGS, TRANSLATIONS
from frame.vllm_names.flags import add_foreign_flags
from frame.vllm_names.unused import UNUSED

from .errors import ConfigError, near
from .file import read_config_file
from .flag_parser import FlagParser, read_json, read_mapping, read_option
from .flat import convert, from_flat, known_names
from .leaves import Leaf, leaves, sections
from .mappings import merge
from .tree import FrameConfig


def add_config_flags(parser: FlagParser, *, positional_model: bool = True) -> None:
    """Adds `[MODEL]`, `--config FILE` and a flag for every setting; parsed arguments hold only flags that were typed.

    `config_from_arguments` makes the configuration of them. `--help` lists groups, and `--help=GROUP` their flags.
    """
    if positional_model:
        parser.add_argument("model_folder", nargs="?", metavar="MODEL", help=leaves()["model"].help)
    parser.add_argument(
        "--config", dest="config_file", metavar="FILE", help="YAML file with settings, which flags override."
    )
    add_setting_flags(parser, leaves().values(), hidden=True)
    add_foreign_flags(parser)
    parser.short_names |= SHORT_FLAGS
    parser.mappings |= {own.name: read_json for own in leaves().values() if own.kind == "mapping"}
    parser.mappings |= dict.fromkeys((*TRANSLATIONS, *UNUSED), read_json) | {"plugin": read_option}
    parser.show_help = lambda name: _help_of(parser, name)
    width = max(map(len, sections()))
    groups = "\n".join(f"  {name:<{width}}  {about}" for name, about in sections().items())
    parser.epilog = (
        f"settings (--help=GROUP, --help=FLAG or --help=all shows their flags):\n{groups}\n"
        f"  {'plugin':<{width}}  Settings of a plugin: --plugin.NAME.FIELD VALUE (see `frame plugins`)."
    )


def add_setting_flags(
    parser: argparse._ActionsContainer, settings: Iterable[Leaf], *, hidden: bool = False, defaults: bool = False
) -> None:
    """Adds a flag for each setting; with `defaults`, parsed arguments hold the defaults of flags that nobody typed."""
    short = {name: flag for flag, name in SHORT_FLAGS.items()}
    for own in settings:
        names = [own.flag, *([short[own.name]] if own.name in short else [])]
        options: dict[str, Any] = {"dest": own.name, "default": argparse.SUPPRESS}
        options["help"] = argparse.SUPPRESS if hidden else help_text(own)
        if own.kind == "bool":
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
        elif own.kind == "list":
            parser.add_argument(*names, nargs="+", metavar=_metavar(own), action="extend", **options)
        else:
            parser.add_argument(*names, type=_reader(own), metavar=_metavar(own), **options)
    if defaults:
        parser.set_defaults(**{own.name: own.default for own in settings})


def config_from_arguments(arguments: argparse.Namespace, **values: Any) -> FrameConfig:
    """Returns the configuration of parsed arguments and their `--config` file; `values` override both.

    Raises `ConfigError`.
    """
    names = set(known_names())
    typed = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    folder = getattr(arguments, "model_folder", None)
    if folder is not None:
        if typed.get("model") not in (None, folder):
            raise ConfigError(f"two models are named: {quoted(folder)} and --model {quoted(typed['model'])}")
        typed["model"] = folder
    file = getattr(arguments, "config_file", None)
    base = read_config_file(file) if file else {}
    return from_flat(merge(merge(base, typed), values))


def help_text(own: Leaf) -> str:
    """Returns a flag's help: description, choices, default."""
    parts = [own.help]
    if own.choices:
        parts.append(f"One of {', '.join(own.choices)}.")
    if own.default not in (None, "", [], {}):
        default = {True: "on", False: "off"}[own.default] if own.kind == "bool" else own.default
        parts.append(f"Default: {default}.")
    return " ".join(parts).replace("%", "%%")


def _metavar(own: Leaf) -> str:
    return {"int": "N", "float": "X", "mapping": "JSON", "choice": "NAME"}.get(own.kind, "TEXT")


def _reader(own: Leaf) -> Any:
    if own.kind == "mapping":
        return read_mapping

    def read(text: str) -> Any:
        try:
            value = convert(own, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{own.name}: ")) from None
        return float(value) if own.kind == "float" else value

    read.__name__ = {"int": "integer", "float": "number"}.get(own.kind, "text")  # argparse puts it into its errors
    return read


def _help_of(parser: FlagParser, name: str) -> str:
    """Returns the text for `--help=NAME`, of a group, a flag or "all"; raises `ConfigError` for another name."""
    wanted = name.strip().lower().removeprefix("--").replace("-", "_")
    group = wanted.removesuffix("config").rstrip("_")
    groups = sections() if wanted == "all" else {group: sections()[group]} if group in sections() else {}
    if not groups and wanted in leaves():
        return _flags_help([leaves()[wanted]])
    if not groups:
        known: Mapping[str, Any] = {**sections(), **leaves()}
        raise ConfigError(
            f"no group or flag {quoted(name)}{near(wanted, known)}; the groups are: {', '.join(sections())}"
        )
    parts = [parser.format_help()] if wanted == "all" else []
    for section, about in groups.items():
        parts.append(
            f"{section}: {about}\n" + _flags_help([one for one in leaves().values() if one.section == section])
        )
    return "\n".join(parts)


def _flags_help(settings: list[Leaf]) -> str:
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    add_setting_flags(parser.add_argument_group(), settings)
    return parser.format_help().lstrip("\n").rstrip() + "\n"
