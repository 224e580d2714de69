"""What is wrong with a request, as errors that name the field: what the front says, and what pydantic found.

Knows no route.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Container, Iterator

from pydantic import ValidationError

from ..interfaces.errors import RequestError
from ..interfaces.sampling import SamplingParams

logger = logging.getLogger("frame.server")

#: Names of ignored request fields that get a line in the log.
_MAX_IGNORED_NAMES = 64
#: How pydantic calls a value in its messages; ours name the field instead.
_PYDANTIC_SUBJECT = re.compile(r"^(Input|String|List|Dictionary) should\b")
#: Branches of unions, as they stand in an error's place.
_BRANCHES = ("str", "int", "float", "bool", "list", "dict")


class IgnoredFields:
    """Logs each name of a request field that nothing reads, once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __call__(self, name: str) -> None:
        """Notes a name; clients may make up as many as they like, so there is a bound."""
        if name in self._names or len(self._names) >= _MAX_IGNORED_NAMES:
            return
        self._names.add(name)
        logger.warning("requests carry the field %.80r, which is ignored (--strict-fields refuses it)", name)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns what the front says about a request into a 400."""
    try:
        yield
    except ValueError as error:
        raise refusal(error) from None


def refusal(error: ValueError) -> RequestError:
    """A 400 that names the field: the one that the error says, else the one that its sentence begins with."""
    param = getattr(error, "param", None) or _subject(str(error), SamplingParams.__struct_fields__)
    return RequestError(400, str(error), param=param)


def _subject(text: str, fields: Container[str]) -> str | None:
    """The first word of a sentence about a field, if it is one of `fields`."""
    first = re.match(r"\w+", text)
    return first.group() if first is not None and first.group() in fields else None


def field_error(error: ValidationError, fields: Container[str]) -> RequestError:
    """What pydantic found first, and in the branch of a union that came closest, as one sentence about the field."""
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
    """Whether a part of an error's place is the name of a union's branch rather than of a field."""
    return isinstance(part, str) and ("[" in part or part.removeprefix("constrained-") in _BRANCHES)
