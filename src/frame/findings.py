"""What pydantic finds wrong with a value, as the end of a sentence that names the value."""

from __future__ import annotations

import re

from pydantic_core import ErrorDetails

from .quoting import quoted

#: The words with which pydantic's messages begin; ours name the setting instead.
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary) should\b")


def predicate(found: ErrorDetails) -> str:
    """Returns what a finding of pydantic says of its subject, which it does not name; of our own checks, all."""
    text = _SUBJECT.sub("must", found["msg"].removeprefix("Value error, ")).replace(" after validation, not ", ", got ")
    text = {"Field required": "is missing", "Extra inputs are not permitted": "is unknown here"}.get(text, text)
    silent = found["type"] in ("value_error", "missing") or "got" in text or isinstance(found["input"], (dict, list))
    return text if silent else f"{text}, got {quoted(found['input'])}"
