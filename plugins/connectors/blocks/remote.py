"""What a request's parameters say of another engine: texts and ports, checked. Knows no connector and no socket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frame.quoting import quoted

#: Characters that a name or an address may have.
MAX_TEXT = 512


class ParamsError(ValueError):
    """A field of `kv_transfer_params` is missing or wrong: a sentence that begins with `name`, the field's."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}")
        self.name = name


def text_of(params: Mapping[str, Any], name: str) -> str:
    """The text of that name. Raises `ParamsError`."""
    value = params.get(name)
    if value is None:
        raise ParamsError(name, "is missing")
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise ParamsError(name, f"must be a text of 1 to {MAX_TEXT} characters, got {quoted(value)}")
    return value


def port_of(params: Mapping[str, Any], name: str) -> int:
    """The port of that name, which may be written as a text. Raises `ParamsError`."""
    value = params.get(name)
    if value is None:
        raise ParamsError(name, "is missing")
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 6:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
        raise ParamsError(name, f"must be a port from 1 to 65535, got {quoted(value)}")
    return value
