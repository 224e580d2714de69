"""The flags of vLLM that are no settings of frame, for argument parsers."""

from __future__ import annotations

import argparse
from typing import Any

from frame.core.config.flag_parser import read_json, read_mapping

from .arguments import LISTS, SHORT_FLAGS, SWITCHES, TRANSLATIONS
from .unused import UNUSED


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags that no setting has the name of, without help; `translate` decides what each does."""
    short = {name: flag for flag, name in SHORT_FLAGS.items()}
    for name in (*TRANSLATIONS, *UNUSED):
        flags = ["--" + name.replace("_", "-"), *([short[name]] if name in short else [])]
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if name in SWITCHES or (name in UNUSED and UNUSED[name].switch):
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        else:
            parser.add_argument(*flags, type=read_json, nargs="+" if name in LISTS else None, **options)
    parser.add_argument("--plugin", type=read_mapping, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
