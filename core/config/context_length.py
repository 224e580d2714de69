"""How many tokens a model was made for: the length that config.json states, under many names, and its rope scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frame.quoting import quoted

from .errors import ConfigError

_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length",
    "max_seq_length", "seq_len",
)  # fmt: skip
#: Rope types whose models state the length after scaling.
_EXTENDED = frozenset(("su", "longrope", "llama3", "default", "mrope", "proportional"))
#: Families that count positions from the padding token's id + 1, so that fewer are left for tokens.
_SHIFTED_POSITIONS = frozenset(("roberta", "xlm-roberta", "camembert"))
#: Most tokens that config.json may state.
MAX_LENGTH = 2**31 - 1
#: Length of models whose config.json states none.
_FALLBACK = 2048


def derive_max_model_len(text: Mapping[str, Any]) -> int:
    """Returns the tokens of prompt and output: the smallest stated length, times the factor by which rope extends it.

    Raises `ConfigError` for a length or factor that is no positive number.
    """
    stated = [_number(key, text[key]) for key in _LENGTH_KEYS if text.get(key) is not None]
    length = min(stated, default=float(_FALLBACK))
    if str(text.get("model_type", "")).startswith("gemma3"):
        return int(length)  # its stated length includes the scaling
    if text.get("model_type") in _SHIFTED_POSITIONS:
        return int(length) - int(text.get("pad_token_id") or 0) - 1
    factor = 1.0
    for rope in rope_parameters(text):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in _EXTENDED or rope.get("factor") is None:
            continue
        factor = max(factor, _number("rope factor", rope["factor"]))
        if kind == "yarn" and rope.get("original_max_position_embeddings") is not None:
            length = _number("original_max_position_embeddings", rope["original_max_position_embeddings"])
    return min(int(length * factor), MAX_LENGTH)


def rope_parameters(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the rope settings, one for each layer type if they differ, from `rope_parameters` or `rope_scaling`.

    `rope_scaling` is the older form, and ignored beside the other.
    """
    value = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(value, Mapping):
        return []
    nested = [part for part in value.values() if isinstance(part, Mapping)]
    return nested or [value]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_LENGTH:
        raise ConfigError(f"{name} of the model must be a positive number up to {MAX_LENGTH}, got {quoted(value)}")
    return float(value)
