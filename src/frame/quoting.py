"""How an error shows a value that a user gave: whole where it is short, else its ends and its length."""

from __future__ import annotations

import re
from typing import Any

#: Characters of a value that are shown whole, and those of a longer one at its beginning and end.
_WHOLE, _FIRST, _LAST = 160, 80, 40
_LONG_QUOTE = re.compile(rf"'([^']{{{_WHOLE + 1},}})'")


def quoted(value: Any) -> str:
    """Returns `value` as a literal of about 160 characters at most."""
    if isinstance(value, str):
        return _with_length(repr(_ends(value)), value)
    try:
        text = repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of too many digits" if isinstance(value, int) else "a value with a number of too many digits"
    return _with_length(_ends(text), text)


def shortened(text: object) -> str:
    """Returns a path, address or name as it is written, and of a long one its beginning, its end and its length."""
    return _with_length(_ends(str(text)), str(text))


def printable(name: str) -> str:
    """Returns as `shortened` a name that a stranger gave, with escapes for what no line of a log can show."""
    return shortened(repr(name)[1:-1])


def cut_quotes(sentence: str) -> str:
    """Returns a sentence of somebody else's, such as argparse's, with its long quotations cut as in `quoted`."""
    return _LONG_QUOTE.sub(lambda found: quoted(found[1]), sentence)


def _ends(text: str) -> str:
    return text if len(text) <= _WHOLE else f"{text[:_FIRST]}…{text[-_LAST:]}"


def _with_length(shown: str, text: str) -> str:
    return shown if len(text) <= _WHOLE else f"{shown} ({len(text)} characters)"
