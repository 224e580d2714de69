"""Rotary position embedding: one table of cosines and sines a model (or layer type), shared by its layers.

Frequencies depend on the positions only, never on the batch, so cached keys stay valid: the variants that stretch
with the sequence ("dynamic", "longrope") are fixed by the longest sequence that the engine serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from frame.core.layers.norm import RMSNorm

from .heads_norm import HeadsNorm, normed_heads

if TYPE_CHECKING:
    from frame.core.layers.build import Build
    from frame.core.ops.layers import Positions

#: Of positions: time, height, width.
_NUM_AXES = 3


@dataclass(frozen=True)
class RopeSpec:
    """The settings that decide the frequencies. `parameters` are those of one layer type in the checkpoint.

    `dim` features of a head are turned, which is the `part` of it that the checkpoint says, but with "proportional".
    """

    parameters: Mapping[str, Any]
    dim: int
    part: float
    base: float
    max_position_embeddings: int
    max_model_len: int

    @property
    def original_max_len(self) -> int:
        """Length of sequences in pre-training, before the context was stretched."""
        return int(self.parameters.get("original_max_position_embeddings") or self.max_position_embeddings)

    @property
    def stretch(self) -> float:
        """The factor of the context's length; derived from the lengths where the checkpoint gives none."""
        return float(self.parameters.get("factor") or self.max_position_embeddings / self.original_max_len)

    def exponents(self) -> Tensor:
        """2i / dim for i < dim / 2, float32."""
        return torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim


Frequencies = tuple[Tensor, float]


def _default(spec: RopeSpec) -> Frequencies:
    """base^(-2i/dim) (Su et al. 2021)."""
    return 1.0 / spec.base ** spec.exponents(), 1.0


def _linear(spec: RopeSpec) -> Frequencies:
    """Positions divided by the factor (Chen et al. 2023)."""
    return _default(spec)[0] / spec.stretch, 1.0


def _dynamic(spec: RopeSpec) -> Frequencies:
    """A larger base once sequences outgrow pre-training (NTK-aware scaling), or with `alpha` whatever their length."""
    if alpha := spec.parameters.get("alpha"):
        base = spec.base * float(alpha) ** (spec.dim / (spec.dim - 2))
        return 1.0 / base ** spec.exponents(), 1.0
    length = max(spec.max_model_len, spec.max_position_embeddings)
    growth = spec.stretch * length / spec.max_position_embeddings - (spec.stretch - 1)
    base = spec.base * growth ** (spec.dim / (spec.dim - 2))
    return 1.0 / base ** spec.exponents(), 1.0


def _llama3(spec: RopeSpec) -> Frequencies:
    """Long waves divided by the factor, short ones kept, a ramp between (Llama 3.1)."""
    low, high = float(spec.parameters["low_freq_factor"]), float(spec.parameters["high_freq_factor"])
    plain = _default(spec)[0]
    turns = spec.original_max_len * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / spec.stretch * (1 - kept), 1.0


def _yarn(spec: RopeSpec) -> Frequencies:
    """Interpolated and plain frequencies mixed by how often they turn in pre-training (Peng et al. 2023)."""
    parameters, dim = spec.parameters, spec.dim

    def dimension(turns: float) -> float:
        return dim * math.log(spec.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(spec.base))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    plain = _default(spec)[0]
    return plain / spec.stretch * interpolated + plain * (1 - interpolated), _yarn_scale(spec)


def _yarn_scale(spec: RopeSpec) -> float:
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if spec.stretch <= 1 else 0.1 * weight * math.log(spec.stretch) + 1.0

    mscale, all_dim = spec.parameters.get("mscale"), spec.parameters.get("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


def _longrope(spec: RopeSpec) -> Frequencies:
    """A learned divisor for each frequency, one set for long and one for short sequences (Ding et al. 2024)."""
    long = spec.max_model_len > spec.original_max_len
    divisors = torch.tensor(spec.parameters["long_factor" if long else "short_factor"], dtype=torch.float32)
    scale = spec.parameters.get("long_mscale" if long else "short_mscale")  # Phi-3.5-MoE's
    if scale is None:
        scale = spec.parameters.get("attention_factor")
    if scale is None:
        stretch = spec.stretch
        scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(spec.original_max_len))
    return 1.0 / (divisors * spec.base ** spec.exponents()), float(scale)


def _proportional(spec: RopeSpec) -> Frequencies:
    """The slowest frequencies of the whole head are left out: their features do not turn (Gemma 4)."""
    frequencies = 1.0 / spec.base ** spec.exponents() / float(spec.parameters.get("factor") or 1.0)
    frequencies[int(spec.dim * spec.part // 2) :] = 0.0
    return frequencies, 1.0


_VARIANTS: Mapping[str, Callable[[RopeSpec], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": _proportional,
}


def rope_parameters(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """The rope settings of a Hugging Face configuration, in its old form or its new one, for one layer type."""
    found = getattr(config, "rope_parameters", None)
    if found is None:
        found = dict(getattr(config, "rope_scaling", None) or {})
        found.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    elif layer_type is not None and isinstance(found.get(layer_type), Mapping):
        found = found[layer_type]
    parameters = dict(found)
    original = getattr(config, "original_max_position_embeddings", None)
    if original and "original_max_position_embeddings" not in parameters:
        parameters["original_max_position_embeddings"] = original
    return parameters


def rope_frequencies(
    config: Any,
    head_dim: int,
    max_model_len: int,
    layer_type: str | None = None,
    partial: float = 1.0,
    base: float | None = None,
) -> Frequencies:
    """(inverse frequencies float32 [rotary_dim / 2], factor on cosines and sines) of a configuration.

    `partial` is the part of a head that is turned where the configuration states none; `base` replaces its rope_theta.
    Raises `ValueError` for an unknown variant, and for a part of an odd number of features.
    """
    parameters = rope_parameters(config, layer_type)
    variant = parameters.get("rope_type") or parameters.get("type") or "default"
    if variant not in _VARIANTS:
        raise ValueError(f"no rope variant {variant!r}; there are: {', '.join(sorted(_VARIANTS))}")
    part = float(parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", partial)))
    dim = head_dim if variant == "proportional" else int(head_dim * part)
    if dim % 2:
        raise ValueError(f"partial_rotary_factor {part} turns {dim} of {head_dim} features; their number must be even")
    spec = RopeSpec(
        parameters=parameters,
        dim=dim,
        part=part,
        base=float(base or parameters.get("rope_theta") or 10000.0),
        max_position_embeddings=config.max_position_embeddings,
        max_model_len=max_model_len,
    )
    return _VARIANTS[variant](spec)


def frequency_axes(sections: Any, num_frequencies: int, *, mixed: bool) -> Tensor:
    """int32 [num_frequencies]: the axis (0 time, 1 height, 2 width) on which each frequency counts positions.

    So many frequencies are of each axis as `sections` (a checkpoint's mrope_section) says: in three runs (Qwen2-VL), or
    `mixed`: one of each axis in turn, and time's behind where the others have no more (Qwen3-VL). Raises `ValueError`
    for sections that are not all frequencies.
    """
    numbers = isinstance(sections, Sequence) and all(type(one) is int and one >= 0 for one in sections)
    if not numbers or len(sections) != _NUM_AXES or sum(sections) != num_frequencies:
        raise ValueError(
            f"mrope_section {sections!r:.80} must be three numbers of frequencies, {num_frequencies} together: "
            "half of the features that are turned"
        )
    if not mixed:
        return torch.repeat_interleave(torch.arange(_NUM_AXES), torch.tensor(sections)).to(torch.int32)
    axes = torch.zeros(num_frequencies, dtype=torch.int32)
    for axis in range(1, _NUM_AXES):
        axes[axis : _NUM_AXES * sections[axis] : _NUM_AXES] = axis
    return axes


def table_device(device: torch.device) -> torch.device:
    """Where tables for a device are computed: there, but on the CPU for one without memory.

    What tensors without memory do is written in Python in torch, whose import takes one to three seconds.
    """
    return torch.device("cpu") if device.type == "meta" else device


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by angles that grow with their positions. `layer_type` picks the settings of one type.

    `interleaved` pairs neighbouring features instead of the two halves of a head. `partial` is the part of a head that
    is turned where the checkpoint states none, `base` what replaces its rope_theta. Where the checkpoint has an
    mrope_section, positions have three axes; `mixed_axes` is what its mrope_interleaved is where it says nothing.
    """

    cos_sin: Tensor
    axes: Tensor | None

    def __init__(
        self,
        build: Build,
        head_dim: int,
        *,
        layer_type: str | None = None,
        interleaved: bool = False,
        partial: float = 1.0,
        base: float | None = None,
        mixed_axes: bool = False,
    ) -> None:
        super().__init__()
        self.ops, self.interleaved = build.ops, interleaved
        frequencies, scale = rope_frequencies(build.config, head_dim, build.max_model_len, layer_type, partial, base)
        device = table_device(build.device)
        positions = torch.arange(build.max_model_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies.to(device))
        table = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)
        self.register_buffer("cos_sin", table.to(build.device), persistent=False)
        parameters, axes = rope_parameters(build.config, layer_type), None
        if (sections := parameters.get("mrope_section")) is not None:
            mixed = bool(parameters.get("mrope_interleaved", mixed_axes))
            axes = frequency_axes(sections, len(frequencies), mixed=mixed).to(build.device)
            build.running.position_axes = _NUM_AXES
        self.register_buffer("axes", axes, persistent=False)

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, norms: tuple[nn.Module, nn.Module] | None = None
    ) -> tuple[Tensor, Tensor]:
        """positions int64 [1 or 3, T], query [T, H, D], key [T, Hk, D] → the turned query and key.

        `norms` (of queries, of keys) normalise each head before; two `RMSNorm`s that differ only in their weights do so
        in one op with the rotation. Two `HeadsNorm`s normalise all heads together, with one sum over ranks.
        """
        places = self._places(positions)
        if norms is not None:
            first, second = norms
            if isinstance(first, RMSNorm) and isinstance(second, RMSNorm) and first.alike(second):
                weights, how = (first.weight, second.weight), (first.eps, first.offset)
                return self.ops.norm_rotary(query, key, weights, *how, places, self.cos_sin, self.interleaved)
            if isinstance(first, HeadsNorm) and isinstance(second, HeadsNorm):
                query, key = normed_heads((first, second), query, key)
            else:
                query, key = first(query), second(key)
        return self.ops.rotary(query, key, places, self.cos_sin, self.interleaved)

    def latents(self, positions: Tensor, query: Tensor, latent: Tensor, norm: RMSNorm, scale: float = 1.0) -> Tensor:
        """Turns the end of `query` [T, H, nope + rope] in place; gives what latent attention stores of `latent`.

        Of `latent` [T, rank + rope] the first part is normalised by `norm` and multiplied with `scale`; the rest turns.
        """
        places = self._places(positions)
        return self.ops.latent_rotary(query, latent, norm.given, places, self.cos_sin, self.interleaved, scale)

    def _places(self, positions: Tensor) -> Positions:
        if self.axes is not None and len(positions) > 1:
            return positions, self.axes
        return positions[0]
