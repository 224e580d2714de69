"""Turns errors of the front and of pydantic into 400 errors that name the field."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Container, Iterator

from pydantic import ValidationError

from ..interfaces.errors import RequestError
from ..interfaces.sampling import SamplingParams

logger = logging.getLogger("frame.server")

#: Most names of ignored request fields that are logged.
_MAX_IGNORED_NAMES = 64
#: The words with which pydantic's messages begin; ours name the field instead.
_PYDANTIC_SUBJECT = re.compile(r"^(Input|String|List|Dictionary) should\b")
#: The names of union branches in the location of a pydantic error.
_BRANCHES = ("str", "int", "float", "bool", "list", "dict")


class IgnoredFields:
    """Logs each name of a request field that nothing reads, once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __call__(self, name: str) -> None:
        """Logs a name; since clients can invent names without end, there is a bound."""
        if name in self._names or len(self._names) >= _MAX_IGNORED_NAMES:
            return
        self._names.add(name)
        logger.warning("requests carry the field %.80r, which is ignored (--strict-fields refuses it)", name)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns errors of the front about a request into a 400."""
    try:
        yield
    except ValueError as error:
        raise refusal(error) from None


def refusal(error: ValueError) -> RequestError:
    """A 400 that names the field: the error's own, else the first word of its message."""
    param = getattr(error, "param", None) or _subject(str(error), SamplingParams.__struct_fields__)
    return RequestError(400, str(error), param=param)


def _subject(text: str, fields: Container[str]) -> str | None:
    """The first word of a sentence about a field, if it is one of `fields`."""
    first = re.match(r"\w+", text)
    return first.group() if first is not None and first.group() in fields else None


def field_error(error: ValidationError, fields: Container[str]) -> RequestError:
    """The first error that pydantic found, in the union branch that came closest, as one sentence about the field."""
    errors = error.errors(include_url=False, include_context=False)
    field = errors[0]["loc"][:1]
    first = max((each for each in errors if each["loc"][:1] == field), key=lambda each: len(each["loc"]))
    names = [str(part) for part in first["loc"] if not _is_branch(part)]
    where = ".".join(names)
    text = _PYDANTIC_SUBJECT.sub("must", first["msg"].removeprefix("Value error, "))
    text = text.replace(" after validation, not ", ", got ")
    text = "is missing" if text == "Field required" else text
    shown = ""
    if isinstance(first["input"], (bool, int, float, str)) and "got" not in text and first["type"] != "value_error":
        shown = f", got {first['input']!r:.80}"
    return RequestError(400, f"{where} {text}{shown}".strip(), param=names[0] if names else _subject(text, fields))


def _is_branch(part: int | str) -> bool:
    """Whether a part of an error's location names a branch of a union rather than a field."""
    return isinstance(part, str) and ("[" in part or part.removeprefix("constrained-") in _BRANCHES)
