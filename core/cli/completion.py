"""`frame completion`: scripts that complete commands, flags and choices in bash, zsh and fish; made from parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..config.compat import TRANSLATIONS, UNUSED
from ..config.flag_parser import FlagParser
from ..config.leaves import leaves
from ..interfaces.endpoint import Command

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
        from .main import commands

        words = {name: words_of(name, command) for name, command in commands().items()}
        print(_HEAD.format(shell=arguments.shell) + _SCRIPTS[arguments.shell](words))
        return 0


def words_of(name: str, command: Command) -> Words:
    """The flags and choices that a command declares; spellings that only vLLM has are left out."""
    parser = FlagParser(prog=f"frame {name}")
    command.add_arguments(parser)
    flags: list[Flag] = []
    first: tuple[str, ...] = ()
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        if not action.option_strings:
            first = first or choices
        elif action.dest not in _FOREIGN:
            own = leaves().get(action.dest)
            about = own.help if own is not None and action.help == argparse.SUPPRESS else action.help or ""
            if own is not None and own.choices:
                choices = tuple(own.choices)
            flags.append(
                Flag(
                    tuple(action.option_strings),
                    about.replace("%(default)s", str(action.default)),
                    action.nargs != 0,
                    choices,
                )
            )
    return Words(command.help, tuple(flags), first)


def _bash(commands: Mapping[str, Words]) -> str:
    values = [
        f"    {name}\\ {flag}) words={_quoted(' '.join(one.choices))} ;;"
        for name, words in commands.items()
        for one in words.flags
        for flag in one.names
        if one.choices
    ]
    free = [
        f"    {name}\\ {flag}) return ;;"
        for name, words in commands.items()
        for one in words.flags
        for flag in one.names
        if one.takes_value and not one.choices
    ]
    flags = [f"      {name}) words={_quoted(' '.join(_names(words)))} ;;" for name, words in commands.items()]
    first = [
        f"      {name}) words={_quoted(' '.join(words.choices))} ;;"
        for name, words in commands.items()
        if words.choices
    ]
    lines = [
        "_frame() {",
        '  local words="" current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        "  COMPREPLY=()",
        '  case "${COMP_WORDS[1]} $before" in',
        *values,
        *free,
        "  esac",
        "  if [[ -z $words && $COMP_CWORD -eq 1 ]]; then",
        f"    words={_quoted(' '.join(commands))}",
        "  elif [[ -z $words && $current == -* ]]; then",
        '    case "${COMP_WORDS[1]}" in',
        *flags,
        "    esac",
        "  elif [[ -z $words ]]; then",
        '    case "${COMP_WORDS[1]}" in',
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
    lines += [f"    {_quoted(name + ':' + words.about)}" for name, words in commands.items()]
    lines += ["  )", "  if (( CURRENT == 2 )); then", "    _describe command commands; return", "  fi"]
    lines += ["  local command=$words[2]", "  shift words; (( CURRENT-- ))", "  case $command in"]
    for name, words in commands.items():
        specs = [_zsh_spec(name, flag) for one in words.flags for name, flag in ((name, one) for name in one.names)]
        choices = f":({' '.join(words.choices)})" if words.choices else ":_files"
        lines.append(f"    {name}) _arguments {' '.join(specs)} {_quoted('*:argument' + choices)} ;;")
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
    names = " ".join(commands)
    lines = [
        f"complete -c frame -f -n 'not __fish_seen_subcommand_from {names}' -a {name} -d {_fish_quoted(words.about)}"
        for name, words in commands.items()
    ]
    for name, words in commands.items():
        start = f"complete -c frame -n '__fish_seen_subcommand_from {name}'"
        if words.choices:
            lines.append(f"{start} -f -a '{' '.join(words.choices)}'")
        lines += [f"{start} {_fish_flag(flag)}" for flag in words.flags]
    return "\n".join(lines)


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


def _names(words: Words) -> Iterator[str]:
    return (name for flag in words.flags for name in flag.names)


def _quoted(text: str) -> str:
    return shlex.quote(text)


_SCRIPTS: Mapping[str, Callable[[Mapping[str, Words]], str]] = MappingProxyType({
    "bash": _bash, "zsh": _zsh, "fish": _fish,
})  # fmt: skip
