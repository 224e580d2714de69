"""The command `frame`: finds the subcommand that was typed and runs it.

Errors that are the user's to mend end as one sentence on stderr and status 1; a misspelt command or flag as status 2.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from frame.quoting import quoted

from ..config.errors import ConfigError, near
from ..config.flag_parser import FlagParser, doubt
from ..interfaces.endpoint import Command
from ..interfaces.setup import Setup
from ..plugin_host.offers import PluginError
from ..plugin_host.registry import Registry
from ..startup.logging import configure_logging
from .children import CHILDREN, run_child

_HELP = """\
usage: frame COMMAND [ARGUMENTS]

LLM inference and serving whose every replaceable part is a plugin.

{commands}

start here:
  frame serve                          # the demo model at http://127.0.0.1:8000, with a page to talk to it
  frame chat -q "Hello!"               # in another terminal
  frame models /path/to/folder         # can a checkpoint be served?
  frame serve /path/to/folder

`frame COMMAND --help` has flags and examples; `frame --version` prints the version.
exit codes: 0 done, 1 failed (one sentence on stderr says why), 2 misspelt command or flag, 130 cut short by ctrl-C.
The first ctrl-C stops `frame serve` in order, which is 0; a second one cuts it short."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `frame ARGUMENTS` and returns the exit status."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return 130
    except (ConfigError, PluginError) as error:
        print(f"frame: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has closed it, as in `frame plugins | head -1`
        _silence_stdout()
        return 0
    except OSError as error:  # a full disk behind stdout, a file without permission
        _silence_stdout()
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"frame: {place}{error.strerror or error}", file=sys.stderr)
        return 1


def _silence_stdout() -> None:
    """Discards what Python still writes to stdout, so that it ends without an error message."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:  # frame help serve
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "-v", "--version", "version"):
        from importlib.metadata import version

        print(f"frame {version('frame-llm')}")
        return 0
    name, *rest = arguments
    if name in CHILDREN:
        return run_child(name, rest)
    command = _find(name)
    if command is None:
        known = sorted(_summaries())
        noun = "flag" if name.startswith("-") else "command"
        listed = f"commands come first: {', '.join(known)}" if noun == "flag" else f"there are: {', '.join(known)}"
        print(f"frame: no {noun} {quoted(name)}{near(name, known)}; {listed}", file=sys.stderr)
        return 2
    parser = FlagParser(prog=f"frame {name}", description=command.help)
    command.add_arguments(parser)
    parser.epilog = "\n\n".join(filter(None, (_examples(command), parser.epilog)))
    parsed = parser.parse_args(rest)
    configure_logging(getattr(parsed, "log_level", "info"))
    try:
        return command.run(parsed)
    except (ConfigError, PluginError) as error:
        if end := doubt(parser, parsed, str(error)):
            raise ConfigError(f"{error}{end}") from None
        raise


def _find(name: str) -> Command | None:
    if name == "serve":  # part of frame itself, so that no package can take its place
        return _serve()
    registry = Registry.load()
    bare = name.rpartition(":")[2]
    if not any(offer.kind == "command" and offer.provider.name == bare for offer in registry.offers):
        return None
    command: Command = registry.make("command", name, Setup())
    return command


def _serve() -> Command:
    from .serve import ServeCommand

    return ServeCommand(Setup())


def commands() -> dict[str, Command]:
    """Every command that a person may type, ours first; those of plugins that cannot be built are left out."""
    found = {"serve": _serve()}
    registry = Registry.load()
    for provider in registry.providers("command"):
        with contextlib.suppress(PluginError):
            found.setdefault(provider.name, registry.make("command", provider, Setup()))
    return found


def _examples(command: Command) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in command.examples) if command.examples else ""


def _summaries() -> dict[str, str]:
    """Every command that a person may type, with its line in `frame --help`."""
    offered = Registry.load().providers("command")
    return {"serve": _serve().help} | {one.name: one.summary for one in offered if one.name != "serve"}


def _help() -> str:
    lines = _summaries()
    width = max(map(len, lines))
    listed = "\n".join(f"  {name:<{width}}  {about}" for name, about in lines.items())
    return _HELP.format(commands=listed)
