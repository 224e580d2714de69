"""Makes the tree from settings by name, which come from keyword arguments, flags or files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from pydantic import ValidationError

from frame.quoting import quoted
from frame.vllm_names.arguments import TRANSLATIONS, translate
from frame.vllm_names.unused import UNUSED

from .errors import ConfigError, near, sentence
from .leaves import Leaf, leaves
from .tree import FrameConfig

#: Suffixes of integers: lower-case ones are decimal, upper-case ones binary.
_FACTORS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"([+-]?[0-9][0-9_]*)(\.[0-9]+)?([kmgtKMGT]?)")
#: More would be rounded.
_MAX_DIGITS = 28
#: Integers that stand for the word "auto".
_AUTO = {"max_model_len": -1, "block_size": 0}


def from_flat(values: Mapping[str, Any]) -> FrameConfig:
    """Returns the tree with `values`, in which None means the default, and vLLM's names stand for frame's.

    Raises `ConfigError`, one sentence, for an unknown name (with near ones), a value out of range, a contradiction.
    """
    tree: dict[str, Any] = {}
    defaults = {name: own.default for name, own in leaves().items()}
    for name, value in translate(values, defaults).items():
        if name == "plugin":
            tree["plugin"] = _plugin_settings(value)
            continue
        if name not in leaves():
            raise ConfigError(f"no setting {quoted(name)}{near(name, known_names())}")
        own = leaves()[name]
        tree.setdefault(own.section, {})[name] = convert(own, value)
    try:
        return FrameConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(sentence(error)) from None


def known_names() -> list[str]:
    """Returns every name that `from_flat` takes."""
    return [*leaves(), *TRANSLATIONS, *UNUSED, "plugin"]


def convert(own: Leaf, value: Any) -> Any:
    """Returns `value` in the form of its setting: 4k as 4000, one name as a list of one, a torch dtype as its name."""
    if own.kind == "int" and isinstance(value, str):
        if own.name in _AUTO and value.strip().lower() == "auto":
            return _AUTO[own.name]
        try:
            return parse_integer(value)
        except ConfigError as error:
            raise ConfigError(f"{own.name}: {error}{', or auto' if own.name in _AUTO else ''}") from None
    if own.kind == "int" and isinstance(value, bool):
        raise ConfigError(f"{own.name} must be an integer, got {quoted(value)}")
    if own.kind == "list":
        return _list(own, [value] if isinstance(value, str) or callable(value) else value)
    if own.kind in ("text", "choice"):
        return str(value).removeprefix("torch.") if own.name == "dtype" else str(value)
    return value


def _list(own: Leaf, items: Any) -> Any:
    """Returns `items`, or the JSON list that its only item is (`--allowed-origins '["*"]'`)."""
    if not isinstance(items, (list, tuple)):
        return items
    if len(items) != 1 or not isinstance(items[0], str) or not items[0].startswith("["):
        return list(items)
    try:
        return list(json.loads(items[0]))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{own.name}: {quoted(items[0])} is not a JSON list: {error}") from None


def _plugin_settings(value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping) or any(not isinstance(options, Mapping) for options in value.values()):
        raise ConfigError(f"plugin must map names to their settings, got {quoted(value)}")
    return {str(name): dict(options) for name, options in value.items()}


def parse_integer(text: str) -> int:
    """Returns the value of "4096", "4k" (4000), "4K" (4096) or "25.6k" (25600).

    Raises `ConfigError` for anything else: a fraction with a binary suffix, or one that is no whole number.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{quoted(text)} is no integer; write 4096, 4k (4000) or 4K (4096)")
    whole, fraction, suffix = match.groups(default="")
    if len(whole) + len(fraction) > _MAX_DIGITS:
        raise ConfigError(f"{quoted(text)} has more than {_MAX_DIGITS} digits; write a shorter integer")
    if fraction and suffix.isupper():
        raise ConfigError(
            f"{quoted(text)} mixes a fraction with the binary suffix {suffix}; write {suffix.lower()} or a whole number"
        )
    value = Decimal(whole.replace("_", "") + fraction) * _FACTORS[suffix]
    if value != int(value):
        raise ConfigError(f"{quoted(text)} is no whole number")
    return int(value)
