"""The error of wrong settings, and the sentence that it carries."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

#: The words with which pydantic's messages begin; ours name the setting instead.
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary) should\b")


class ConfigError(ValueError):
    """A setting is unknown, wrong or contradicts another; the message is one sentence naming it and its value."""


def near(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean X?)" for a misspelt name; "" when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def sentence(error: ValidationError) -> str:
    """Returns pydantic's first finding as one sentence: the setting, what it must be, and its value."""
    first = error.errors()[0]
    names = [str(part) for part in first["loc"]]
    name = names[1] if len(names) > 1 else ".".join(names)
    return predicate(first) if first["type"] == "value_error" else f"{name} {predicate(first)}"


def predicate(found: ErrorDetails) -> str:
    """Returns what a finding of pydantic says of its subject, which it does not name; of our own checks, all."""
    text = _SUBJECT.sub("must", found["msg"].removeprefix("Value error, ")).replace(" after validation, not ", ", got ")
    text = {"Field required": "is missing", "Extra inputs are not permitted": "is unknown here"}.get(text, text)
    silent = found["type"] in ("value_error", "missing") or "got" in text or isinstance(found["input"], (dict, list))
    return text if silent else f"{text}, got {found['input']!r:.200}"
