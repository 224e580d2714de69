"""The page of commands, from the argument parser of each."""

from __future__ import annotations

import argparse
from importlib import import_module

from tables import our_providers, table

from frame.core.config.flag_parser import FlagParser
from frame.core.interfaces.setup import Setup
from frame.vllm_names.arguments import SHORT_FLAGS


def page() -> str:
    """The page as Markdown."""
    parts = ["# Commands"]
    targets = {"serve": "frame.core.cli.serve:ServeCommand"}
    targets |= {provider.name: provider.target for provider in our_providers("command")}
    for name, target in targets.items():
        module, _, kind = target.partition(":")
        command = getattr(import_module(module), kind)(Setup())
        parser = FlagParser(prog=f"frame {name}", description=command.help)
        command.add_arguments(parser)
        parts += [f"## frame {name}", command.help]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for part, own in action.choices.items():
                    parts += [f"### frame {name} {part}", own.description, _arguments(own)]
                break
        else:
            parts.append(_arguments(parser))
        if name == "serve":
            parts.append(
                "All [settings](configuration.md) are flags; `--help=GROUP`, `--help=FLAG` and `--help=all` show them. "
                f"Short forms: {', '.join(f'`{flag}` is `--{long}`' for flag, long in _short_flags())}."
            )
    return "\n\n".join(parts)


def _arguments(parser: argparse.ArgumentParser) -> str:
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    return table(("argument", "meaning"), [(_spelling(action), _meaning(action)) for action in actions])


def _short_flags() -> list[tuple[str, str]]:
    return [(flag, name.replace("_", "-")) for flag, name in SHORT_FLAGS.items()]


def _spelling(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"`[{value}]`" if action.nargs == "?" else f"`{value}`"
    return f"`{', '.join(action.option_strings)} {value}`".replace(" `", "`")


def _meaning(action: argparse.Action) -> str:
    return (action.help or "").replace("%(default)s", str(action.default))
