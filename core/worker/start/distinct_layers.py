"""A model cut down to layers that differ: a step of it launches the kernels that a step of the whole model does."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from torch import nn

from ...interfaces.model import Model
from ...layers.build import Layers
from ...layers.cached import CachedLayer


@contextmanager
def distinct_layers(model: Model) -> Iterator[None]:
    """While inside, what `build.layers` made lacks layers that are made as others are, and follow one made as theirs.

    The last one stays. Attention layers that are left out keep their places in the cache's layout.
    """
    whole = [
        (module, name, layers)
        for module in list(model.modules())
        for name, layers in module.named_children()
        if isinstance(layers, Layers)
    ]
    for module, name, layers in whole:
        setattr(module, name, Layers(_distinct(layers)))
    try:
        yield
    finally:
        for module, name, layers in whole:
            setattr(module, name, layers)


def _distinct(layers: nn.ModuleList) -> list[nn.Module]:
    kept: list[nn.Module] = []
    seen: set[tuple[Hashable, Hashable]] = set()
    before: Hashable = None
    for index, layer in enumerate(layers):
        made = _made(layer)
        if (before, made) not in seen or index == len(layers) - 1:
            kept.append(layer)
        seen.add((before, made))
        before = made
    return kept


def _made(layer: nn.Module) -> Hashable:
    """What a layer's launches depend on: its modules, its tensors' shapes, its attention."""
    kinds = tuple((name, type(module)) for name, module in layer.named_modules())
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    specs = tuple(
        (module.backend_spec, module.kv_spec()) for module in layer.modules() if isinstance(module, CachedLayer)
    )
    return kinds, shapes, specs
