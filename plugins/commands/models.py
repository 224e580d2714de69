"""`frame models`: what can be served, what a folder holds, or what a server serves. Reads no weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from frame.interfaces import DTYPE_BYTES, Command
from frame.settings import ConfigError, Registry, fetch_model, from_flat, read_checkpoint

from .doctor.estimate import estimate_weights
from .doctor.layers import read_shape
from .stored_tensors import read_header
from .terminal import TerminalClient, TerminalError, add_client_arguments


class ModelsCommand(Command):
    """Lists architectures, shows the facts of a checkpoint's folder, or with `--url` what a server serves."""

    help = "List architectures, look into a checkpoint, or ask a server: frame models [FOLDER]."
    examples = (
        "frame models                                    # architectures that can be served",
        "frame models /models/qwen3                      # can it be served, and how large is it?",
        "frame models --url http://127.0.0.1:8000        # what a running server serves",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the folder, the server's address and the form of the output."""
        parser.add_argument(
            "folder",
            nargs="?",
            metavar="FOLDER",
            help="Folder of a checkpoint, or ORG/NAME where it was downloaded before.",
        )
        add_client_arguments(parser, sampling=False, url=None)
        parser.add_argument("--json", action="store_true", help="Print JSON.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Status 1 when the checkpoint cannot be served or the server does not answer."""
        if arguments.url is not None:
            return _ask(arguments)
        providers = Registry.load().providers("model")
        if arguments.folder is None:
            rows = sorted((provider.name, provider.summary) for provider in providers)
            _print([{"architecture": name, "family": family} for name, family in rows], arguments.json)
            return 0
        facts = look(arguments.folder, [provider.name for provider in providers])
        _print([facts], arguments.json)
        return 0 if facts["served"] else 1


def look(folder: str, architectures: Sequence[str]) -> dict[str, Any]:
    """The facts of a checkpoint; `problem` says why it cannot be served, None if it can. Raises `ConfigError`."""
    checkpoint = read_checkpoint(fetch_model(from_flat({"model": folder}), only_cached=True))
    files = sorted(checkpoint.folder.glob("*.safetensors"))
    problem = None
    if checkpoint.architecture not in architectures:
        problem = f"no model {checkpoint.architecture!r}; `frame models` lists the ones that can be served"
    elif not files:
        problem = "there is no .safetensors file; the sizes are counted from config.json"
    parameters, weights_bytes = 0, sum(file.stat().st_size for file in files)
    try:
        parameters = sum(tensor.elements for file in files for tensor in read_header(file))
        if not files:
            expected = estimate_weights(checkpoint, read_shape(checkpoint, "float32"), DTYPE_BYTES[checkpoint.dtype])
            parameters, weights_bytes = expected.elements, expected.read_bytes
    except ConfigError as error:
        problem = str(error)
    return {
        "folder": str(checkpoint.folder),
        "architecture": checkpoint.architecture,
        "served": problem is None,
        "problem": problem,
        "parameters": parameters,
        "weights_bytes": weights_bytes,
        "dtype": checkpoint.dtype,
        "max_model_len": checkpoint.model_max_len,
        "vocab_size": checkpoint.vocab_size,
        "layers": checkpoint.text.get("num_hidden_layers"),
        "hidden_size": checkpoint.text.get("hidden_size"),
        "quantization": (checkpoint.hf.get("quantization_config") or {}).get("quant_method"),
    }


def _ask(arguments: argparse.Namespace) -> int:
    import sys

    try:
        names = TerminalClient(arguments).served_models()
    except TerminalError as error:
        print(f"frame: {error}", file=sys.stderr)
        return 1
    _print([{"model": name} for name in names], arguments.json)
    return 0


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
    elif len(rows) == 1:
        width = max(map(len, rows[0]))
        for name, value in rows[0].items():
            print(f"{name:<{width}}  {_shown(value)}")
    else:
        width = max((len(str(next(iter(row.values())))) for row in rows), default=0)
        for row in rows:
            first, *rest = row.values()
            print(f"{first:<{width}}  {'  '.join(rest)}".rstrip())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
