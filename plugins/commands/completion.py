"""`frame completion`: scripts that complete commands, flags and choices in a shell, made from parsers by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from frame.interfaces import Command
from frame.settings import ENGINE_PLUGINS, TEXT_PLUGINS, FlagParser, Registry, commands, leaves
from frame.vllm_names.arguments import TRANSLATIONS
from frame.vllm_names.unused import UNUSED

_HEAD = "# Made by `frame completion {shell}`; make it again after an update or a new plugin.\n"
_FOREIGN = frozenset((*TRANSLATIONS, *UNUSED, "plugin"))


class CompletionCommand(Command):
    """Prints a script; the examples in the help show how each shell loads it."""

    help = "Print a completion script: frame completion bash|zsh|fish."
    examples = (
        "source <(frame completion bash)                       # in ~/.bashrc",
        "frame completion zsh > ~/.zfunc/_frame                # a folder of $fpath",
        "frame completion fish > ~/.config/fish/completions/frame.fish",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The shell."""
        parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="The shell to make it for.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Prints the script."""
        import shtab

        script = shtab.complete(parser_of(commands(), plugin_names(Registry.load())), arguments.shell)
        print(_HEAD.format(shell=arguments.shell) + script if arguments.shell != "zsh" else script)
        return 0


def plugin_names(registry: Registry) -> dict[str, tuple[str, ...]]:
    """Setting that names a plugin → the names that it may have."""
    kinds = {**ENGINE_PLUGINS, **TEXT_PLUGINS}
    return {setting: tuple(one.name for one in registry.providers(kind)) for setting, kind in kinds.items()}


def parser_of(found: Mapping[str, Command], plugins: Mapping[str, Sequence[str]]) -> argparse.ArgumentParser:
    """One parser of all commands, which shtab reads and nobody runs. Spellings that only vLLM has are hidden.

    `plugins` gives the choices of settings that name plugins.
    """
    parser = FlagParser(prog="frame", description="LLM inference and serving.")
    parts = parser.add_subparsers(parser_class=FlagParser)
    for name, command in found.items():
        part = parts.add_parser(name, help=command.help)
        command.add_arguments(part)
        _complete(part, plugins)
    return parser


def _complete(parser: argparse.ArgumentParser, plugins: Mapping[str, Sequence[str]]) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                _complete(part, plugins)
            continue
        own = leaves().get(action.dest)
        if action.dest in _FOREIGN:
            action.help = argparse.SUPPRESS
        elif own is not None and action.help == argparse.SUPPRESS:
            action.help = own.help.replace("%", "%%")
        if action.nargs != 0:
            action.choices = action.choices or plugins.get(action.dest) or (own and own.choices) or None
