"""The error of wrong settings, and the sentence that it carries."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError

from frame.findings import predicate
from frame.quoting import shortened


class ConfigError(ValueError):
    """A setting is unknown, wrong or contradicts another; the message is one sentence naming it and its value."""


def near(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean X?)" for a misspelt name; "" when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def sentence(error: ValidationError) -> str:
    """Returns pydantic's first finding as one sentence: the setting, what it must be, and its value."""
    first = error.errors()[0]
    names = [shortened(part) for part in first["loc"]]
    name = names[1] if len(names) > 1 else ".".join(names)
    return predicate(first) if first["type"] == "value_error" else f"{name} {predicate(first)}"
