"""Reads values that models write as text: JSON, or Python literals by a small parser.

Nothing is evaluated: a literal is a number, a text, true, false, none, or a list, tuple or mapping of literals.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 64

_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"\s*")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\\": "\\", "'": "'",
    '"': '"', "\n": "", "/": "/",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
#: Digits that a number may have; Python itself refuses integers of more than 4300.
_MAX_DIGITS = 4000


class LiteralError(ValueError):
    """The text is not a literal."""


def read_json(text: str) -> Any:
    """A JSON value; raises `LiteralError`, also for numbers that JSON does not have."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        raise LiteralError(f"not JSON: {text[:40]!r}") from None


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise LiteralError(f"JSON has no {digits[:40]}")
    return number


def _refuse(name: str) -> None:
    raise LiteralError(f"JSON has no {name}")


def read_literal(text: str) -> Any:
    """A Python literal; raises `LiteralError`. A tuple is a list, keys of a mapping become text."""
    value, at = _value(text, _skip(text, 0), 0)
    if _skip(text, at) != len(text):
        raise LiteralError("text after a literal")
    return value


def to_json(value: Any) -> str:
    """A literal as JSON text, in which characters beyond ASCII are not escaped."""
    return whole_characters(json.dumps(value, ensure_ascii=False))


def whole_characters(text: str) -> str:
    """The text with pairs of surrogates joined, and lone ones as U+FFFD, because UTF-8 cannot encode them."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH or at >= len(text):
        raise LiteralError("nested too deeply, or not a literal")
    character = text[at]
    if character in "'\"":
        return _text(text, at)
    if character in "[(":
        return _sequence(text, at, depth)
    if character == "{":
        return _mapping(text, at, depth)
    word = _WORD.match(text, at)
    if word is not None:
        if word.group() not in _WORDS:
            raise LiteralError(f"not a literal: {word.group()[:40]!r}")
        return _WORDS[word.group()], word.end()
    return _number(text, at)


def _number(text: str, at: int) -> tuple[int | float, int]:
    match = _NUMBER.match(text, at)
    if match is None or match.end() - at > _MAX_DIGITS:
        raise LiteralError(f"not a literal: {text[at : at + 40]!r}")
    digits = match.group().replace("_", "")
    if any(character in digits for character in ".eE"):
        return _finite(digits), match.end()
    return int(digits), match.end()


def _sequence(text: str, at: int, depth: int) -> tuple[Any, int]:
    closer = "]" if text[at] == "[" else ")"
    items: list[Any] = []
    at, comma = _skip(text, at + 1), False
    while at < len(text) and text[at] != closer:
        item, at = _value(text, at, depth + 1)
        items.append(item)
        at = _skip(text, at)
        comma = text[at : at + 1] == ","
        if comma:
            at = _skip(text, at + 1)
        elif text[at : at + 1] != closer:
            raise LiteralError("a list that does not end")
    if at >= len(text):
        raise LiteralError("a list that does not end")
    if closer == ")" and len(items) == 1 and not comma:
        return items[0], at + 1  # parentheses around one value
    return items, at + 1


def _mapping(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at + 1)
    while at < len(text) and text[at] != "}":
        key, at = _value(text, at, depth + 1)
        if isinstance(key, (list, dict)):
            raise LiteralError("a key that is not a scalar")
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise LiteralError("a mapping without values")
        value, at = _value(text, _skip(text, at + 1), depth + 1)
        found[key if isinstance(key, str) else to_json(key)] = value
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "}":
            raise LiteralError("a mapping that does not end")
    if at >= len(text):
        raise LiteralError("a mapping that does not end")
    return found, at + 1


def _text(text: str, at: int) -> tuple[str, int]:
    """A quoted text, joined with quoted texts that follow it directly, as Python does."""
    pieces: list[str] = []
    while True:
        piece, at = _one_text(text, at)
        pieces.append(piece)
        following = _skip(text, at)
        if text[following : following + 1] not in ("'", '"') or not text[following : following + 1]:
            return whole_characters("".join(pieces)), at
        at = following


def _one_text(text: str, at: int) -> tuple[str, int]:
    quote = text[at]
    if text.startswith(quote * 3, at):
        end = text.find(quote * 3, at + 3)
        if end < 0:
            raise LiteralError("a text that does not end")
        return text[at + 3 : end], end + 3
    pieces, at = [], at + 1
    while True:
        plain = _PLAIN[quote].match(text, at)
        if plain is None or plain.end() >= len(text):
            raise LiteralError("a text that does not end")
        pieces.append(plain.group())
        at = plain.end()
        if text[at] == quote:
            return "".join(pieces), at + 1
        piece, at = _escape(text, at + 1)
        pieces.append(piece)


def _escape(text: str, at: int) -> tuple[str, int]:
    """The character of an escape; an unknown escape is kept with its backslash."""
    character = text[at : at + 1]
    if character in _HEX:
        digits = text[at + 1 : at + 1 + _HEX[character]]
        if len(digits) == _HEX[character] and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            code = int(digits, 16)
            if code <= 0x10FFFF:
                return chr(code), at + 1 + len(digits)
        raise LiteralError("a broken escape")
    if not character:
        raise LiteralError("a text that does not end")
    return _ESCAPES.get(character, "\\" + character), at + 1
