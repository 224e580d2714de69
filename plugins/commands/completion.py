"""`frame completion`: scripts that complete commands, flags and choices in bash, zsh and fish; made from parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from frame.interfaces import Command
from frame.settings import ENGINE_PLUGINS, TEXT_PLUGINS, FlagParser, Registry, leaves
from frame.vllm_names.arguments import TRANSLATIONS
from frame.vllm_names.unused import UNUSED

_HEAD = "# Made by `frame completion {shell}`; make it again after an update or a new plugin.\n"
_FOREIGN = frozenset((*TRANSLATIONS, *UNUSED, "plugin"))


@dataclass(frozen=True)
class Flag:
    """One flag of a command: its spellings, what it means, and its value (`choices` are the values there are)."""

    names: tuple[str, ...]
    about: str
    takes_value: bool
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Words:
    """What can be typed after a command. `choices` are those of its first argument."""

    about: str
    flags: tuple[Flag, ...]
    choices: tuple[str, ...] = ()


class CompletionCommand(Command):
    """Prints a script; the shell's own way of loading it is in the help."""

    help = "Print a completion script: frame completion bash|zsh|fish."
    examples = (
        "source <(frame completion bash)                       # in ~/.bashrc",
        "frame completion zsh > ~/.zfunc/_frame                # a folder of $fpath",
        "frame completion fish > ~/.config/fish/completions/frame.fish",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The shell."""
        parser.add_argument("shell", choices=tuple(_SCRIPTS), help="The shell to make it for.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Prints the script."""
        from frame.core.cli.main import commands

        words: dict[str, Words] = {}
        names = plugin_names(Registry.load())
        for name, command in commands().items():
            words |= words_of(name, command, names)
        print(_HEAD.format(shell=arguments.shell) + _SCRIPTS[arguments.shell](words))
        return 0


def plugin_names(registry: Registry) -> dict[str, tuple[str, ...]]:
    """Setting that names a plugin → the names of those that can be chosen."""
    kinds = {**ENGINE_PLUGINS, **TEXT_PLUGINS}
    return {setting: tuple(one.name for one in registry.providers(kind)) for setting, kind in kinds.items()}


def words_of(name: str, command: Command, plugins: Mapping[str, Sequence[str]]) -> dict[str, Words]:
    """What may follow `name`, and each of its subcommands ("bench serve"); spellings that only vLLM has are left out.

    `plugins` gives the choices of settings that name plugins.
    """
    parser = FlagParser(prog=f"frame {name}")
    command.add_arguments(parser)
    return dict(_words(name, command.help, parser, plugins))


def _words(
    name: str, about: str, parser: argparse.ArgumentParser, plugins: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Words]]:
    flags: list[Flag] = []
    first: tuple[str, ...] = ()
    for action in parser._actions:
        choices = tuple(map(str, action.choices or plugins.get(action.dest, ())))
        if not action.option_strings:
            first = first or choices
        elif action.dest not in _FOREIGN:
            own = leaves().get(action.dest)
            said = own.help if own is not None and action.help == argparse.SUPPRESS else action.help or ""
            if own is not None and own.choices:
                choices = tuple(own.choices)
            flags.append(
                Flag(
                    tuple(action.option_strings),
                    said.replace("%(default)s", str(action.default)),
                    action.nargs != 0,
                    choices,
                )
            )
    yield name, Words(about, tuple(flags), first)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, own_parser in action.choices.items():
                yield from _words(f"{name} {inner}", own_parser.description or "", own_parser, plugins)


def _bash(commands: Mapping[str, Words]) -> str:
    values = [
        f"    {_quoted(f'{name} {flag}')}) words={_quoted(' '.join(one.choices))} ;;"
        for name, words in commands.items()
        for one in words.flags
        for flag in one.names
        if one.choices
    ]
    free = [
        f"    {_quoted(f'{name} {flag}')}) return ;;"
        for name, words in commands.items()
        for one in words.flags
        for flag in one.names
        if one.takes_value and not one.choices
    ]
    flags = [f"      {_quoted(name)}) words={_quoted(' '.join(_names(words)))} ;;" for name, words in commands.items()]
    first = [
        f"      {_quoted(name)}) words={_quoted(' '.join(words.choices))} ;;"
        for name, words in commands.items()
        if words.choices
    ]
    lines = [
        "_frame() {",
        '  local words="" current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        "  COMPREPLY=()",
        '  local command="${COMP_WORDS[1]}"',
        *(
            f'  [[ $COMP_CWORD -gt 2 && "$command ${{COMP_WORDS[2]}}" == {_quoted(name)} ]] && command={_quoted(name)}'
            for name in commands
            if " " in name
        ),
        '  case "$command $before" in',
        *values,
        *free,
        "  esac",
        "  if [[ -z $words && $COMP_CWORD -eq 1 ]]; then",
        f"    words={_quoted(' '.join(_first_words(commands)))}",
        "  elif [[ -z $words && $current == -* ]]; then",
        '    case "$command" in',
        *flags,
        "    esac",
        "  elif [[ -z $words ]]; then",
        '    case "$command" in',
        *first,
        "    esac",
        "  fi",
        '  [[ -n $words ]] && mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")',
        "}",
        "complete -o default -F _frame frame",
    ]
    return "\n".join(lines)


def _zsh(commands: Mapping[str, Words]) -> str:
    lines = ["#compdef frame", "_frame() {", "  local -a commands=("]
    lines += [f"    {_quoted(name + ':' + commands[name].about)}" for name in _first_words(commands)]
    lines += ["  )", "  if (( CURRENT == 2 )); then", "    _describe command commands; return", "  fi"]
    lines += ["  local command=$words[2]", "  shift words; (( CURRENT-- ))"]
    lines += [
        f'  if [[ $CURRENT -gt 2 && "$command $words[2]" == {_quoted(name)} ]]; then'
        f" command={_quoted(name)}; shift words; (( CURRENT-- )); fi"
        for name in commands
        if " " in name
    ]
    lines.append("  case $command in")
    for name, words in commands.items():
        specs = [_zsh_spec(name, flag) for one in words.flags for name, flag in ((name, one) for name in one.names)]
        choices = f":({' '.join(words.choices)})" if words.choices else ":_files"
        lines.append(f"    {_quoted(name)}) _arguments {' '.join(specs)} {_quoted('*:argument' + choices)} ;;")
    lines += [
        "  esac",
        "}",
        'if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _frame "$@"; else compdef _frame frame; fi',
    ]
    return "\n".join(lines)


def _zsh_spec(name: str, flag: Flag) -> str:
    about = flag.about
    for special in ("\\", "[", "]", ":"):
        about = about.replace(special, "\\" + special)
    value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files" if flag.takes_value else ""
    return _quoted(f"*{name}[{about}]{value}")


def _fish(commands: Mapping[str, Words]) -> str:
    first = _first_words(commands)
    names = " ".join(first)
    lines = [
        f"complete -c frame -f -n 'not __fish_seen_subcommand_from {names}' -a {name} -d {_fish_quoted(about)}"
        for name, about in ((name, commands[name].about) for name in first)
    ]
    for name, words in commands.items():
        start = f"complete -c frame -n '{_fish_place(name, commands)}'"
        if words.choices:
            lines.append(f"{start} -f -a '{' '.join(words.choices)}'")
        lines += [f"{start} {_fish_flag(flag)}" for flag in words.flags]
    return "\n".join(lines)


def _fish_place(name: str, commands: Mapping[str, Words]) -> str:
    """The condition under which the words of `name` are offered; `serve` is a command and a subcommand of `bench`."""
    above, _, below = name.rpartition(" ")
    if above:
        return f"__fish_seen_subcommand_from {above}; and __fish_seen_subcommand_from {below}"
    owners = [one.split()[0] for one in commands if one.endswith(f" {name}")]
    own = [one.split()[1] for one in commands if one.startswith(f"{name} ")]
    apart = f"; and not __fish_seen_subcommand_from {' '.join(owners + own)}" if owners or own else ""
    return f"__fish_seen_subcommand_from {name}{apart}"


def _fish_flag(flag: Flag) -> str:
    parts = []
    for name in flag.names:
        kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
        parts.append(f"{kind} {name.lstrip('-')}")
    if flag.choices:
        parts.append(f"-x -a '{' '.join(flag.choices)}'")
    elif flag.takes_value:
        parts.append("-r")
    return f"{' '.join(parts)} -d {_fish_quoted(flag.about)}"


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _first_words(commands: Mapping[str, Words]) -> list[str]:
    return [name for name in commands if " " not in name]


def _names(words: Words) -> Iterator[str]:
    return (name for flag in words.flags for name in flag.names)


def _quoted(text: str) -> str:
    return shlex.quote(text)


_SCRIPTS: Mapping[str, Callable[[Mapping[str, Words]], str]] = MappingProxyType({
    "bash": _bash, "zsh": _zsh, "fish": _fish,
})  # fmt: skip
