"""The JSON files of a checkpoint folder, with errors of one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ConfigError


def read_json(path: Path, needed: str = "") -> dict[str, Any]:
    """The object in `path`; raises `ConfigError` when it is missing (`needed` says why it is asked for) or wrong."""
    content = _read(path, needed)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_optional(path: Path) -> dict[str, Any]:
    """The object in `path`, {} when there is no such file."""
    return read_json(path) if path.exists() else {}


def read_list(path: Path) -> list[dict[str, Any]]:
    """The list of objects in `path`, [] when there is no such file."""
    content = _read(path, "") if path.exists() else []
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ConfigError(f"{path} must hold a JSON list of objects")
    return content


def _read(path: Path, needed: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no {path.name} in {path.parent}; {needed}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
