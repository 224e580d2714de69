"""Formats of weights that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LinearMethod, LinearSpec
from tests.contract.quantizations import Rounded, RoundedLinear


class _Moving(RoundedLinear):
    def finish_load(self, layer: Any) -> None:
        layer.scales.data = layer.scales.data.clone()


class Moving(Rounded):
    """Gives a parameter another address once it is loaded."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Moving()


class _Deaf(RoundedLinear):
    def apply_gated(self, layer: Any, x: Tensor, bias: Tensor | None, activation: Any = "silu") -> Tensor:
        return super().apply_gated(layer, x, bias, "silu")


class Deaf(Rounded):
    """Takes every gate for silu."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Deaf()


class _Coarse(RoundedLinear):
    def round(self, layer: Any, rows: slice, piece: Tensor) -> None:
        super().round(layer, rows, piece)
        layer.codes[rows] = layer.codes[rows] // 64 * 64


class Coarse(Rounded):
    """Keeps two bits."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Coarse()


class _PerShare(RoundedLinear):
    def round(self, layer: Any, rows: slice, piece: Tensor) -> None:
        super().round(layer, rows, piece)
        layer.scales[rows] = layer.scales[rows].amax()
        layer.scales[rows] *= torch.tensor(len(piece) / 256)


class PerShare(Rounded):
    """Scales weights by how many rows a rank has."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _PerShare()
