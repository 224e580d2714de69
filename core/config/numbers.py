"""Integers as people write them: 8k, 1M, 25.6k. Lower-case suffixes are decimal, upper-case ones binary."""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import ConfigError

_FACTORS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"([+-]?[0-9][0-9_]*)(\.[0-9]+)?([kmgtKMGT]?)")


def parse_integer(text: str) -> int:
    """The value of "4096", "4k" (4000), "4K" (4096) or "25.6k" (25600).

    Raises `ConfigError` for anything else: a fraction with a binary suffix, or one that is no whole number.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no integer; write 4096, 4k (4000) or 4K (4096)")
    whole, fraction, suffix = match.groups(default="")
    if fraction and suffix.isupper():
        raise ConfigError(
            f"{text!r} mixes a fraction with the binary suffix {suffix}; write {suffix.lower()} or a whole number"
        )
    value = Decimal(whole.replace("_", "") + fraction) * _FACTORS[suffix]
    if value != int(value):
        raise ConfigError(f"{text!r} is no whole number")
    return int(value)
