"""The dense modules of sentence-transformers, which follow pooling: sizes and activations. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.quoting import quoted

from .errors import ConfigError
from .json_file import read_json

#: Names of modules of torch.nn.
DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


@dataclass(frozen=True)
class DenseModule:
    """activation(x Wᵀ + b) for pooled vectors x [N, in_features]; `folder` has config.json and the weights."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


def read_dense(folder: Path, modules: list[dict[str, Any]], kinds: list[str]) -> tuple[DenseModule, ...]:
    """Returns the dense modules of a model in order; raises `ConfigError` for one that does not follow pooling."""
    places = [place for place, kind in enumerate(kinds) if kind == "Dense"]
    if places and ("Pooling" not in kinds or places[0] < kinds.index("Pooling")):
        raise ConfigError(f"{folder / 'modules.json'} has a module Dense before Pooling; it must follow it")
    return tuple(_read(folder / str(modules[place].get("path", ""))) for place in places)


def _read(folder: Path) -> DenseModule:
    path = folder / "config.json"
    settings = read_json(path, "a module Dense has one")
    activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in DENSE_ACTIVATIONS:
        raise ConfigError(f"no activation {quoted(activation)} ({path}); there are: {', '.join(DENSE_ACTIVATIONS)}")
    before, after = _size(path, settings, "in_features"), _size(path, settings, "out_features")
    return DenseModule(folder, before, after, bool(settings.get("bias", True)), activation)


def _size(path: Path, settings: Mapping[str, Any], name: str) -> int:
    size = settings.get(name)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 1 << 20:
        raise ConfigError(f"{name} in {path} must be a positive integer up to {1 << 20}, got {quoted(size)}")
    return size
