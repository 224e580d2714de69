"""The entries of `lora_modules`: adapters that a server loads at its start. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

from frame.quoting import quoted


def read_module(text: str) -> tuple[str, str, str | None]:
    """(name, folder, base model) of an entry of `lora_modules`; raises `ValueError`."""
    if not text.startswith("{"):
        name, _, path = text.partition("=")
        if not (name and path):
            raise ValueError(f"lora_modules: {quoted(text)} is not NAME=FOLDER")
        return name, path, None
    try:
        given: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"lora_modules: {quoted(text)} is not JSON: {error}") from None
    known = ("name", "path", "base_model_name")
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(f"lora_modules: no field {quoted(unknown[0])}; there are: {', '.join(known)}")
    values = [given.get(key) for key in known]
    if not all(isinstance(value, str) and value for value in values[:2]):
        raise ValueError(f"lora_modules: {quoted(text)} needs a name and a path")
    if not isinstance(values[2], str | None):
        raise ValueError(f"lora_modules: base_model_name must be text, got {quoted(values[2])}")
    return values[0], values[1], values[2]
