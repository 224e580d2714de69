"""The tensors of a checkpoint from the headers of its safetensors files. Reads no weight and needs no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from frame.settings import ConfigError

from ..stored_tensors import StoredTensor, read_header

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf"))
#: Names of floating-point types in safetensors headers.
_FLOATS = frozenset(("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))


@dataclass(frozen=True)
class Weights:
    """`file_bytes` by stored type, elements that the model holds, and what the loader reads."""

    files: int
    file_bytes: Mapping[str, int]
    elements: int
    read_bytes: int


def has_weights(folder: Path) -> bool:
    """Whether there is any file of weights, also of a format that frame refuses to load."""
    return any(path.suffix in _SUFFIXES for path in folder.iterdir())


def read_weights(folder: Path, *, tied: bool) -> Weights:
    """All files of a checkpoint; `tied`: the output head is the embedding and is not held twice.

    Raises `ConfigError` for a folder without safetensors, a missing part or a broken header.
    """
    files = _files(folder)
    by_dtype: Counter[str] = Counter()
    elements = read_bytes = 0
    for path, wanted in files:
        for tensor in read_header(path):
            if wanted is not None and tensor.name not in wanted:
                continue
            by_dtype[tensor.dtype] += tensor.num_bytes
            if is_held(tensor, tied):
                elements += tensor.elements
                read_bytes += tensor.num_bytes
    return Weights(len(files), dict(by_dtype), elements, read_bytes)


def is_held(tensor: StoredTensor, tied: bool) -> bool:
    """Whether a tensor becomes a parameter: not buffers of other frameworks, nor a tied head's copy."""
    if tensor.dtype not in _FLOATS or tensor.name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")):
        return False
    return not (tied and tensor.name.endswith("lm_head.weight"))


def _files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """(file, names to take from it or None for all), as the loader reads them."""
    index = folder / _INDEX
    if index.is_file():
        try:
            names: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            parts = {file: {name for name, own in names.items() if own == file} for file in sorted(set(names.values()))}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{index} is not a safetensors index") from None
        missing = [file for file in parts if not (folder / file).is_file()]
        if missing:
            raise ConfigError(
                f"{index} names {missing[0]}, which is missing ({len(missing)} of {len(parts)} files are)"
            )
        return [(folder / file, wanted) for file, wanted in parts.items()]
    if (folder / _SINGLE).is_file():
        return [(folder / _SINGLE, None)]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"there is no .safetensors file in {folder}; pickles (.bin, .pt) are refused")
    return [(path, None) for path in found]
