"""Reads the JSON files of a checkpoint folder, and says in one sentence what is wrong with them.

Only regular files up to a bound are read: reading a pipe would block until somebody writes to it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from .errors import ConfigError

#: Most bytes of a file, and of one that grows with the vocabulary or the number of tensors.
_MAX_BYTES, _MAX_LIST_BYTES = 16 << 20, 512 << 20
_LISTS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "spiece.model")
_READ = (".json", ".jinja", ".txt", ".model", ".safetensors")


def check_files(folder: Path) -> None:
    """Raises `ConfigError` if a file in `folder` that may be read is not a regular one, or is too large."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(_READ))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
    for name in names:
        if (folder / name).exists():  # a broken link counts as no file
            _check(folder / name, os.stat(folder / name))


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
        raise ConfigError(f"{path} is {kind}, where a file is needed")
    is_list = path.name in _LISTS or path.name.endswith(".index.json")
    most = _MAX_LIST_BYTES if is_list else _MAX_BYTES
    if path.suffix != ".safetensors" and found.st_size > most:
        raise ConfigError(f"{path} has {found.st_size} bytes; such a file may have at most {most}")


def _read_bytes(path: Path) -> bytes:
    """Returns the bytes of a file that passes `_check`; never blocks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        _check(path, os.fstat(descriptor))
        return file.read(_MAX_LIST_BYTES)


def read_json(path: Path, needed: str = "") -> dict[str, Any]:
    """Returns the object in `path`; raises `ConfigError` for a wrong or missing file (`needed`: why it must exist)."""
    content = _read(path, needed)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_optional(path: Path) -> dict[str, Any]:
    """Returns the object in `path`, or {} when there is no such file."""
    return read_json(path) if path.exists() else {}


def read_list(path: Path) -> list[dict[str, Any]]:
    """Returns the list of objects in `path`, or [] when there is no such file."""
    content = _read(path, "") if path.exists() else []
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ConfigError(f"{path} must hold a JSON list of objects")
    return content


def _special(value: dict[str, Any]) -> Any:
    """An object, or the number for which transformers writes {"__float__": "Infinity"}, as JSON has none."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _read(path: Path, needed: str) -> Any:
    try:
        return json.loads(_read_bytes(path), object_hook=_special)
    except FileNotFoundError:
        raise ConfigError(f"no {path.name} in {path.parent}; {needed}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
