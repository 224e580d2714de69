"""`frame run-batch`: answers a file of requests, one a line, with an engine of its own. Imports no torch itself."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, cast
from urllib.parse import urlsplit

from frame.interfaces import Command
from frame.quoting import quoted
from frame.settings import (
    ConfigError,
    FlagParser,
    Registry,
    add_config_flags,
    config_from_arguments,
    fetch_model,
    read_checkpoint,
)

from .fetch import FetchError, FetchRules, download, upload

_MAX_WIDTH = 4096
#: Errors of a write, which names no file.
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


class RunBatchCommand(Command):
    """Reads and writes files or URLs. The same command continues a run that was stopped."""

    help = "Answer a file of requests: frame run-batch -i IN.jsonl -o OUT.jsonl [MODEL]."
    examples = ("frame run-batch -i requests.jsonl -o answers.jsonl /models/qwen3",)
    #: the command that starts the engine process; tests replace it
    engine_command: ClassVar[Sequence[str] | None] = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The two files, and all settings of the configuration tree."""
        parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="Requests: a JSONL file or URL.")
        parser.add_argument(
            "-o", "--output-file", required=True, metavar="FILE", help="Results: a file, or a URL that accepts PUT."
        )
        parser.add_argument("--width", type=int, default=256, help="Lines that run at once (default: %(default)s).")
        parser.add_argument("--no-progress", action="store_true", help="Show no progress bar.")
        parser.add_argument(
            "--allow-private-addresses",
            action="store_true",
            help="Allow URLs whose host has a private or loopback address.",
        )
        add_config_flags(cast("FlagParser", parser))

    def run(self, arguments: argparse.Namespace) -> int:
        """Returns 1 when lines could not be served; a line that was refused counts as answered."""
        from .command_run import run_batch

        if not 1 <= arguments.width <= _MAX_WIDTH:
            raise ConfigError(f"--width must be from 1 to {_MAX_WIDTH}, got {arguments.width}")
        config = config_from_arguments(arguments)
        Registry.load().check(config)
        config = fetch_model(config, command=True)
        read_checkpoint(config)
        rules = FetchRules(private=arguments.allow_private_addresses)
        try:
            with _input(arguments.input_file, rules) as source, _output(arguments.output_file, rules) as target:
                run = run_batch(
                    config,
                    source,
                    target,
                    width=arguments.width,
                    progress=not arguments.no_progress,
                    command=self.engine_command,
                )
                counts = asyncio.run(run)
        except FetchError as error:
            raise ConfigError(str(error)) from None
        except OSError as error:
            if error.filename is None and error.errno not in _NO_ROOM:
                raise
            place = error.filename or arguments.output_file
            raise ConfigError(f"{place} cannot be read or written: {error.strerror}") from None
        earlier = f", {counts.earlier} answered by an earlier run" if counts.earlier else ""
        lines = "1 line" if counts.total == 1 else f"{counts.total} lines"
        print(f"{lines}: {counts.succeeded} succeeded, {counts.failed} failed{earlier}", file=sys.stderr)
        if counts.unserved:
            print(f"frame: {counts.unserved} lines could not be served; run the command again", file=sys.stderr)
        return 1 if counts.unserved else 0


def _is_url(name: str) -> bool:
    return "://" in name


@contextlib.contextmanager
def _input(name: str, rules: FetchRules) -> Iterator[Path]:
    """The input as a local file."""
    if not _is_url(name):
        if not Path(name).is_file():
            raise ConfigError(f"there is no input file {quoted(name)}")
        yield Path(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input.jsonl"
        with path.open("wb") as file:
            for chunk in download(name, rules):
                file.write(chunk)
        yield path


@contextlib.contextmanager
def _output(name: str, rules: FetchRules) -> Iterator[Path]:
    """The local file for results. Results for a URL are collected in the working folder until they are sent."""
    if not _is_url(name):
        if not Path(name).resolve().parent.is_dir():
            raise ConfigError(
                f"there is no folder {quoted(str(Path(name).resolve().parent))} for the results; make it first"
            )
        if Path(name).exists() and not Path(name).is_file():  # what is there is read first
            raise ConfigError(f"the results cannot be kept in {quoted(name)}, which is no file")
        yield Path(name)
        return
    parts = urlsplit(name)  # without the query, whose signature changes from run to run
    digest = hashlib.sha256(f"{parts.netloc}{parts.path}".encode()).hexdigest()[:12]
    path = Path(f"frame-batch-{digest}.jsonl")
    yield path
    with path.open("rb") as file:
        upload(name, rules, file, path.stat().st_size)
    path.unlink()
