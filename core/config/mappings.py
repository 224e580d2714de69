"""Merges nested mappings, and sets values in them by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frame.quoting import quoted, shortened

from .errors import ConfigError


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the values of `over`; mappings are merged key by key, other values replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def put(target: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets target[path[0]][path[1]]… in place; if the last part ends in "+", it appends to a list instead."""
    for part in path[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{shortened('.'.join(path))}: {shortened(part)} already has the value {quoted(target)}")
    last = path[-1]
    if not last.endswith("+"):
        target[last] = value
        return
    items = target.setdefault(last[:-1], [])
    if not isinstance(items, list):
        raise ConfigError(f"{shortened('.'.join(path))}: {shortened(last[:-1])} is no list but {quoted(items)}")
    items.extend(value if isinstance(value, list) else [value])
