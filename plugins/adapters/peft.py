"""Reads the folder of a PEFT adapter. All is checked against the model's layers before any tensor is read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .joined import JoinedExperts, experts_named
from .peft_config import CONFIG, WEIGHTS, PeftConfig, check_folder

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


@dataclass(frozen=True)
class Taken:
    """What of a model takes adapters: `sizes` (inputs, outputs) by tensor, and layers whose experts PEFT may join.

    `refused` says of further layers of experts why they take none. `renames` are the model's.
    """

    sizes: Mapping[str, tuple[int, int]]
    max_rank: int
    renames: Sequence[tuple[str, str]] = ()
    experts: Mapping[str, JoinedExperts] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


class _Place(NamedTuple):
    """A pair of tensors of the file: PEFT's names of the module and of both; `joined` where it is of all experts."""

    module: str
    a: str
    b: str
    layer: str
    joined: tuple[JoinedExperts, str, bool] | None = None

    def read(self, file: Any, config: PeftConfig) -> dict[str, Matrices]:
        """The matrices, by checkpoint tensor."""
        a, b = file.get_tensor(self.a), file.get_tensor(self.b)
        if self.joined is None:
            return {self.layer: Matrices(a, b, config.scale_of(self.module))}
        experts, parameter, exchanged = self.joined
        scale = config.scale_of(f"{self.module}.{parameter}")
        apart = experts.apart(parameter, a, b, exchanged=exchanged)
        return {name: Matrices(*matrices, scale) for name, matrices in apart.items()}


def read_adapter(folder: Path, taken: Taken) -> tuple[str, dict[str, Matrices], PeftConfig]:
    """(digest, matrices by checkpoint tensor, configuration).

    Raises `ValueError`, one sentence that names what is wrong.
    """
    config, path = check_folder(folder), folder / WEIGHTS
    try:
        with safe_open(str(path), framework="pt") as file:
            found = dict[str, Matrices]()
            for place in _places(file, path, config, taken):
                made = place.read(file, config)
                if twice := sorted(made.keys() & found.keys()):  # of all experts, and of one
                    raise ValueError(f"{path} has several adapters of {twice[0]}")
                found.update(made)
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


def _places(file: Any, path: Path, config: PeftConfig, taken: Taken) -> list[_Place]:
    """The adapters in a file, whose shapes are right."""
    modules: dict[str, dict[str, str]] = {}
    for name in file.keys():  # noqa: SIM118  # it is no mapping
        match = _PAIR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            what = next((what for part, what in _OTHERS.items() if part in name), "no matrix of an adapter")
            raise ValueError(f"{path}: {name} is {what}, which is not served")
        modules.setdefault(match[1], {})[match[2]] = name
    if not modules:
        raise ValueError(f"{path} holds no adapter: it has no tensors")
    places: dict[str, _Place] = {}
    try:
        for module, names in modules.items():
            place = _place(file, module, names, config, taken)
            if place.layer in places:
                raise ValueError(f"{module} and {places[place.layer].module} are adapters of one layer")
            places[place.layer] = place
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return list(places.values())


def _place(file: Any, module: str, names: Mapping[str, str], config: PeftConfig, taken: Taken) -> _Place:
    plain = module.replace(".base_layer", "")  # of a parameter beside which another one of its module is adapted
    layer = _renamed(plain, taken.renames)
    experts = experts_named(layer, taken.experts)
    if layer not in taken.sizes and experts is None:
        raise ValueError(_unknown(plain, layer, taken))
    if len(names) < 2:
        raise ValueError(f"{module} has lora_{next(iter(names))}, and not the other matrix")
    shapes = [_shape(file, names[kind]) for kind in "AB"]
    if experts is not None:
        parameter, exchanged = experts.parameter_of(plain, shapes, config)
        _check_rank(module, config.rank_of(f"{plain}.{parameter}"), taken.max_rank)
        joined = experts, parameter, exchanged
        return _Place(plain, names["A"], names["B"], f"{experts.prefix}.{parameter}", joined)
    rank, (inputs, outputs) = config.rank_of(plain), taken.sizes[layer]
    _check_rank(module, rank, taken.max_rank)
    if shapes != [[rank, inputs], [outputs, rank]]:
        raise ValueError(
            f"the matrices of {module} have the shapes {shapes[0]} and {shapes[1]}; with rank {rank} the "
            f"layer takes {[rank, inputs]} and {[outputs, rank]}"
        )
    return _Place(plain, names["A"], names["B"], layer)


def _check_rank(module: str, rank: int, most: int) -> None:
    if rank > most:
        raise ValueError(f"{module} has rank {rank}, and the most is {most} (max_lora_rank)")


def _shape(file: Any, name: str) -> list[int]:
    part = file.get_slice(name)
    if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise ValueError(f"{name} is {part.get_dtype()}, which is none of F64, F32, F16, BF16")
    return list(part.get_shape())


def _unknown(module: str, layer: str, taken: Taken) -> str:
    for prefix, why in taken.refused.items():
        if layer == prefix or layer.startswith(f"{prefix}."):
            return f"it has an adapter of {module}, but routed experts take none here: {why}"
    for pattern, why in _LAYERS.items():
        if re.search(pattern, layer):
            return f"it has an adapter of {module}, but {why}"
    ends = sorted({name.rpartition(".")[2] for name in taken.sizes})
    return f"the model has no linear layer {module} that takes an adapter; those that do end in {', '.join(ends)}"


def _renamed(module: str, renames: Sequence[tuple[str, str]]) -> str:
    """The layer's name: that of its weight, after the model's renames."""
    name = f"{module}.weight"
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name.removesuffix(".weight")
