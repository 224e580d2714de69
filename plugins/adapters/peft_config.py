"""Reads adapter_config.json, as PEFT writes it, and refuses what would change the result and is not computed here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.settings import ConfigError, check_files

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
#: Settings that change what an adapter computes, with what they ask for; each is refused when it is set.
_NOT_COMPUTED = {
    "use_dora": "a magnitude for each output (DoRA), which is not a sum of two products",
    "lora_bias": "biases beside the matrices",
    "modules_to_save": "whole layers in place of the model's",
    "trainable_token_indices": "other embeddings of single tokens",
    "alora_invocation_tokens": "an adapter that begins with certain tokens of the prompt",
    "layer_replication": "layers that the model has several times",
    "use_qalora": "inputs that are pooled by groups",
    "use_bdlora": "matrices of blocks",
    "arrow_config": "a choice among adapters for each token",
    "kasa_config": "singular values beside the matrices",
    "velora_config": "inputs that are projected first",
    "corda_config": "other weights of the model, which CorDA changed",
}
#: Ways of initialising that changed the weights of the model itself.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
#: What a rank or an alpha must be below, and how long a pattern of module names may be and how often it may repeat.
_MOST, _LONGEST, _REPEATS = 1e30, 200, 3


@dataclass(frozen=True)
class PeftConfig:
    """What of adapter_config.json counts: ranks and scales, by module."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base_model: str | None
    version: tuple[int, int] = (0, 0)  # of PEFT, which wrote it; (0, 0) where it does not say

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        rank: int = _matching(self.rank_pattern, module, self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023), of the module's own rank and alpha."""
        rank, alpha = self.rank_of(module), _matching(self.alpha_pattern, module, self.alpha)
        scale: float = alpha / (math.sqrt(rank) if self.rslora else rank)
        return scale


def read_config(folder: Path) -> PeftConfig:
    """Raises `ValueError`, one sentence, for a file that is missing, broken or asks for what is not computed."""
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} has no {CONFIG}")
    try:
        check_files(folder)
        given: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG} cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{folder / CONFIG} must hold a JSON object")
    try:
        return _checked(given)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None


def check_folder(folder: Path) -> PeftConfig:
    """As `read_config`; raises `ValueError` for a folder without weights that can be read, too."""
    config = read_config(folder)
    if not (folder / WEIGHTS).is_file():
        other = next((name for name in _PICKLES if (folder / name).is_file()), None)
        if other is not None:
            raise ValueError(f"{folder / other} is a pickle, which is not read; save the adapter as {WEIGHTS}")
        raise ValueError(f"{folder} has no {WEIGHTS}")
    return config


def _checked(given: Mapping[str, Any]) -> PeftConfig:
    kind = given.get("peft_type")
    if str(kind).upper() != "LORA":
        raise ValueError(f"peft_type must be LORA, got {kind!r:.80}")
    for name, asks in _NOT_COMPUTED.items():
        if given.get(name):
            raise ValueError(f"{name} asks for {asks}: adapters with it are not served")
    if given.get("bias", "none") != "none":
        raise ValueError(f"bias {given['bias']!r:.80}: adapters with biases are not served")
    how = given.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGED_BASE):
        raise ValueError(
            f"init_lora_weights {how!r:.80} changed the weights of the model, to which the adapter belongs; convert it "
            "to a plain adapter when saving it (path_initial_model_for_weight_conversion)"
        )
    rank = _number(given, "r", whole=True)
    base = given.get("base_model_name_or_path")
    return PeftConfig(
        rank=int(rank),
        alpha=_number(given, "lora_alpha"),
        rslora=bool(given.get("use_rslora")),
        rank_pattern={key: int(value) for key, value in _pattern(given, "rank_pattern").items()},
        alpha_pattern=_pattern(given, "alpha_pattern"),
        base_model=base if isinstance(base, str) else None,
        version=_version(given.get("peft_version")),
    )


def _version(given: Any) -> tuple[int, int]:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", given) if isinstance(given, str) else None
    return (0, 0) if match is None else (int(match[1]), int(match[2]))


def _number(given: Mapping[str, Any], name: str, *, whole: bool = False) -> float:
    value: Any = given.get(name)
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
    if not good or (whole and (value != int(value) or value < 1)):
        raise ValueError(f"{name} must be a {'whole number from 1' if whole else 'number'}, got {value!r:.80}")
    return float(value)


def _pattern(given: Mapping[str, Any], name: str) -> dict[str, float]:
    patterns = given.get(name) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{name} must map modules to numbers, got {patterns!r:.80}")
    for pattern in patterns:
        if len(pattern) > _LONGEST or re.search(r"\)[*+{?]", pattern) or len(re.findall(r"[*+{]", pattern)) > _REPEATS:
            raise ValueError(f"{name}: {pattern!r:.80} repeats more than can be matched in bounded time")
        _number(patterns, pattern, whole=name == "rank_pattern")
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{name}: {pattern!r:.80} is no regular expression: {error}") from None
    return {pattern: float(value) for pattern, value in patterns.items()}


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches a whole name or its end, from a dot on, as in PEFT."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
