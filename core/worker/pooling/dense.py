"""Dense modules of sentence-transformers: what becomes of pooled vectors before they are cut and normalised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...config.dense_modules import DenseModule
from ...interfaces.setup import LoaderSetup
from ...plugin_host.registry import Registry


class DenseLayers:
    """The modules' products, in float32, one after the other; without any, vectors stay as they are."""

    def __init__(
        self, modules: Sequence[DenseModule], hidden_size: int, registry: Registry, device: torch.device
    ) -> None:
        self.size = hidden_size
        self._layers: list[tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]] = []
        for module in modules:
            if module.in_features != self.size:
                given = f"{module.folder / 'config.json'}: in_features {module.in_features}"
                raise ValueError(f"{given}, but what comes before gives vectors of {self.size} numbers")
            tensors = _read(module, registry)
            bias = tensors["linear.bias"].to(device, torch.float32) if module.bias else None
            weight = tensors["linear.weight"].to(device, torch.float32)
            self._layers.append((weight, bias, getattr(nn, module.activation)()))
            self.size = module.out_features

    def __call__(self, rows: Tensor) -> Tensor:
        """[N, hidden_size] → [N, size]."""
        for weight, bias, activation in self._layers:
            rows = activation(functional.linear(rows.float(), weight, bias))
        return rows


def _read(module: DenseModule, registry: Registry) -> dict[str, Tensor]:
    """The tensors of a module; raises `ValueError` where one is missing, left over or of another shape."""
    loader = registry.make("loader", "safetensors", LoaderSetup(module.folder, named=True))
    found = {tensor.name: tensor.read() for tensor in loader.tensors()}
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (module.out_features, module.in_features)}
    if module.bias:
        expected["linear.bias"] = (module.out_features,)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes != expected:
        raise ValueError(f"the weights in {module.folder} must be {expected}, got {shapes}")
    return found
