"""Which kernel multiplies: the quickest as measured for the shape on this device, else a fixed choice.

Shapes are met in the warm-up, in which every candidate of a new one is launched once, so that all are compiled with
the other kernels. `settle` then has those measured that no file knows. Knows no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .candidates import CUBLAS, LIBRARY, Product, Shape, candidates, is_served, product, without_times
from .times import Table, best_of, measured, packed, unpacked

#: Choices that are remembered by their rows; all are forgotten when there are more.
_MOST = 1 << 16
_Key = tuple[int, int, int, bool, torch.dtype]
Measure = Callable[[Mapping[Shape, Tensor], torch.device, int], Table]


class Products:
    """The products of one device. Its `settle` is called once, between the warm-up and the first request."""

    def __init__(self, device: torch.device, *, measure: Measure = measured) -> None:
        self._device = device
        self._measure = measure
        self._met: dict[Shape, Tensor] = {}  # a weight of each shape, until they are measured
        self._settled = False
        self._table: Table = {}
        self._chosen: dict[_Key, tuple[Product, str]] = {}

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
        """x Wᵀ + b for x [rows, inputs] and weight [outputs, inputs]; with `gated` silu(a) · b of its halves a, b."""
        outputs, inputs = weight.shape
        key = (len(x), outputs, inputs, gated, weight.dtype)
        call, name = self._chosen.get(key) or self._choose(key, x, weight)
        if name not in LIBRARY and not is_served(name, x, weight):
            call, _ = self._library(gated)
        return call(x, weight, bias)

    def name(self, rows: int, shape: Shape) -> str:
        """The candidate that is taken for so many rows."""
        known = candidates(rows, shape, self._device)
        points = self._table.get(shape)
        return best_of(points, rows, known) if points else without_times(rows, known)

    def settle(self, max_rows: int, agree: Callable[[bytes], bytes] = lambda times: times) -> None:
        """Decides for all shapes that were met, for steps of up to `max_rows` rows, once their kernels are compiled.

        `agree` takes this worker's times and returns those by which all workers of a tensor group decide: what each
        of them computes whole, such as a router's scores, must have the same bits.
        """
        self._settled = True
        met, self._met = self._met, {}
        times = agree(packed(self._measure(met, self._device, max_rows)))
        self._table.update(unpacked(times))  # also shapes that only the other one met before: they may come yet
        self._chosen.clear()

    def _choose(self, key: _Key, x: Tensor, weight: Tensor) -> tuple[Product, str]:
        rows, outputs, inputs, gated, dtype = key
        shape = Shape(outputs, inputs, gated, dtype)
        if not self._settled and shape not in self._met:
            self._met[shape] = weight
            self._launch_all(shape, x, weight)
        name = self.name(rows, shape)
        found = candidates(rows, shape, self._device)[name], name
        if len(self._chosen) >= _MOST:
            self._chosen.clear()
        self._chosen[key] = found
        return found

    def _launch_all(self, shape: Shape, x: Tensor, weight: Tensor) -> None:
        """Launches every candidate once, so that its kernel is compiled with the others of the warm-up."""
        for rows in (1, 8, 16, 128):
            sample = x.new_empty(rows, shape.inputs)
            for name, call in candidates(rows, shape, self._device).items():
                if name in LIBRARY or is_served(name, sample, weight):
                    call(sample, weight, None)

    def _library(self, gated: bool) -> tuple[Product, str]:
        found = product(CUBLAS, self._device, gated)
        if found is None:
            raise RuntimeError("the library serves every product")
        return found, CUBLAS
