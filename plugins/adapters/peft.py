"""Reads the folder of a PEFT adapter. All is checked against the model's layers before any tensor is read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .peft_config import CONFIG, PeftConfig, read_config

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(.+)\.lora_([AB])\.weight")
#: What tensors of other names are, by what their names hold.
_OTHERS = {
    "lora_embedding_": "an adapter of an embedding",
    "lora_magnitude_vector": "a magnitude for each output (DoRA)",
    ".bias": "a bias",
    ".modules_to_save.": "a whole layer in place of the model's",
}
_LAYERS = {
    r"(^|\.)(lm_head|embed_out|output_layer)$": "the head takes no adapter",
    r"(^|\.)(embed_tokens|wte|wpe|word_embeddings)$": "embeddings take no adapters",
    r"\.experts(\.|$)": "routed experts take no adapters",
    r"\.(gate|router)$": "routers take no adapters",
    r"\.kv_b_proj$": "what makes keys and values of latents takes no adapter: it is part of other products",
}


class Matrices(NamedTuple):
    """The adapter of one checkpoint tensor: `down` [rank, in_features], `up` [outputs, rank] without its `scale`."""

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


def read_adapter(
    folder: Path, sizes: Mapping[str, tuple[int, int]], max_rank: int, renames: Sequence[tuple[str, str]]
) -> tuple[str, dict[str, Matrices], PeftConfig]:
    """(digest, matrices by layer, configuration); `sizes` are (inputs, outputs) of the layers that take adapters.

    `renames` are the model's. Raises `ValueError`, one sentence that names what is wrong.
    """
    config = read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        other = next((name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).is_file()), None)
        if other is not None:
            raise ValueError(f"{folder / other} is a pickle, which is not read; save the adapter as {WEIGHTS}")
        raise ValueError(f"{folder} has no {WEIGHTS}")
    try:
        with safe_open(str(path), framework="pt") as file:
            places = _places(file, path, config, sizes, max_rank, renames)
            found = {
                layer: Matrices(file.get_tensor(down), file.get_tensor(up), config.scale_of(module))
                for layer, (module, down, up) in places.items()
            }
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for layer, matrices in found.items():
        if not (torch.isfinite(matrices.down).all() and torch.isfinite(matrices.up).all()):
            raise ValueError(f"{path}: the matrices of {layer} hold values that are not finite")
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with path.open("rb") as raw:
        while piece := raw.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest(), found, config


def _places(
    file: Any,
    path: Path,
    config: PeftConfig,
    sizes: Mapping[str, tuple[int, int]],
    max_rank: int,
    renames: Sequence[tuple[str, str]],
) -> dict[str, tuple[str, str, str]]:
    """By layer: PEFT's name of the module, and the names of its two tensors, whose shapes are right."""
    modules: dict[str, dict[str, str]] = {}
    for name in file.keys():  # noqa: SIM118  # it is no mapping
        match = _PAIR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            what = next((what for part, what in _OTHERS.items() if part in name), "no matrix of an adapter")
            raise ValueError(f"{path}: {name} is {what}, which is not served")
        modules.setdefault(match[1], {})[match[2]] = name
    if not modules:
        raise ValueError(f"{path} holds no adapter: it has no tensors")
    places = {}
    for module, names in modules.items():
        layer = _renamed(module, renames)
        if layer not in sizes:
            raise ValueError(f"{path}: {_unknown(module, layer, sizes)}")
        if len(names) < 2:
            raise ValueError(f"{path}: {module} has lora_{next(iter(names))}, and not the other matrix")
        shapes = [_shape(file, path, names[kind]) for kind in "AB"]
        rank, (inputs, outputs) = config.rank_of(module), sizes[layer]
        if rank > max_rank:
            raise ValueError(f"{path}: {module} has rank {rank}, and the most is {max_rank} (max_lora_rank)")
        if shapes != [[rank, inputs], [outputs, rank]]:
            raise ValueError(
                f"{path}: the matrices of {module} have the shapes {shapes[0]} and {shapes[1]}; with rank {rank} the "
                f"layer takes {[rank, inputs]} and {[outputs, rank]}"
            )
        places[layer] = module, names["A"], names["B"]
    return places


def _shape(file: Any, path: Path, name: str) -> list[int]:
    part = file.get_slice(name)
    if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise ValueError(f"{path}: {name} is {part.get_dtype()}, which is none of F64, F32, F16, BF16")
    return list(part.get_shape())


def _unknown(module: str, layer: str, sizes: Mapping[str, Any]) -> str:
    for pattern, why in _LAYERS.items():
        if re.search(pattern, layer):
            return f"it has an adapter of {module}, but {why}"
    ends = sorted({name.rpartition(".")[2] for name in sizes})
    return f"the model has no linear layer {module} that takes an adapter; those that do end in {', '.join(ends)}"


def _renamed(module: str, renames: Sequence[tuple[str, str]]) -> str:
    """The layer's name: that of its weight, after the model's renames."""
    name = f"{module}.weight"
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name.removesuffix(".weight")
