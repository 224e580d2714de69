"""Layers of several tensors that are not stored alike: one is left as it is, or has other bits."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from frame.interfaces import LinearMethod, LinearSpec
from frame.layers import PlainLinear, WeightSlot

S = TypeVar("S", bound=Hashable)


class LinearPart(nn.Module):
    """What a method takes for a layer: some rows of one."""

    def __init__(self, layer: Any, spec: LinearSpec) -> None:
        super().__init__()
        self.spec, self.ops, self.dtype, self.device, self.empty = (
            spec,
            layer.ops,
            layer.dtype,
            layer.device,
            layer.empty,
        )


class JoinedLinear(LinearMethod):
    """Runs of rows, each with a method of its own, whose products are put side by side."""

    def __init__(self, parts: list[tuple[LinearMethod, LinearSpec]]) -> None:
        self._parts = parts

    @property
    def stages(self) -> bool:  # type: ignore[override]
        """Whether one of them stages."""
        return any(method.stages for method, _ in self._parts)

    def create(self, layer: Any) -> list[WeightSlot]:
        layer.parts = nn.ModuleList(LinearPart(layer, spec) for _, spec in self._parts)
        return [slot for method, part in self._of(layer) for slot in method.create(part)]

    def begin_load(self, layer: Any) -> None:
        for method, part in self._of(layer):
            method.begin_load(part)

    def finish_load(self, layer: Any) -> None:
        for method, part in self._of(layer):
            method.finish_load(part)

    def pack(self, layer: Any) -> None:
        for method, part in self._of(layer):
            method.pack(part)

    def unpack(self, layer: Any) -> None:
        for method, part in self._of(layer):
            method.unpack(part)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        sizes = [spec.out_features for _, spec in self._parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return torch.cat(
            [method.apply(part, x, own) for (method, part), own in zip(self._of(layer), biases, strict=True)], -1
        )

    def _of(self, layer: Any) -> list[tuple[LinearMethod, Any]]:
        return [(method, part) for (method, _), part in zip(self._parts, layer.parts, strict=True)]


def by_parts(
    spec: LinearSpec,
    scheme_of: Callable[[str], S | None],
    method_of: Callable[[S], LinearMethod],
    apart: Callable[[S], bool] = lambda scheme: False,
) -> LinearMethod | None:
    """The method of a layer, whose tensors may be stored by several schemes; None if by none of them.

    `scheme_of(name)` is that of the tensor "NAME.weight", None where it is not quantised. Neighbours of one scheme
    share a method, unless this is to keep them `apart`.
    """
    runs: list[tuple[S | None, LinearSpec]] = []
    for scheme, some in groupby(spec.rows, lambda part: scheme_of(part.name)):
        rows = tuple(some)
        for run in [(part,) for part in rows] if scheme is not None and apart(scheme) else [rows]:
            runs.append((scheme, _of_rows(spec, run)))
    if all(scheme is None for scheme, _ in runs):
        return None
    if len(runs) == 1 and runs[0][0] is not None:
        return method_of(runs[0][0])
    return JoinedLinear([(PlainLinear() if scheme is None else method_of(scheme), own) for scheme, own in runs])


def _of_rows(spec: LinearSpec, rows: tuple[Any, ...]) -> LinearSpec:
    return LinearSpec(rows, spec.columns, spec.in_features, spec.bias, spec.transposed, spec.exact)
