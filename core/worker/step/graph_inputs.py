"""Where everything lies that a forward pass reads: a recorded step reads it there again. Knows no recording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ...interfaces.model import Model
from ...interfaces.platform import StepShape
from ...layers.cached import CachedLayer
from ...ops.step import StepBuffers
from .prefix_tiles import PrefixTiles


class RecordedInputs:
    """The inputs of one runner's steps: its buffers, the KV cache, the weights, and others that have no other name."""

    def __init__(self, model: Model, buffers: StepBuffers, prefixes: PrefixTiles, others: Mapping[str, Tensor]) -> None:
        self._model = model
        self._others = others
        self._buffers = buffers
        self._prefixes = prefixes
        self._recorded: dict[StepShape, dict[str, int]] = {}

    def addresses(self) -> dict[str, int]:
        """Each input's address by its name."""
        return {name: tensor.data_ptr() for name, tensor in self._tensors()}

    def check(self, shape: StepShape) -> None:
        """Called before each run of a recorded step, the first of which records it; raises when an input moved."""
        now = self.addresses()
        then = self._recorded.setdefault(shape, now)
        moved = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        if moved:
            raise RuntimeError(
                f"the recorded step of {shape.padded_tokens} tokens would read {moved[0]!r} where it lay when it was "
                f"recorded, but it has moved, with {len(moved) - 1} other inputs; whoever moves tensors must drop the "
                "recordings"
            )

    def forget(self) -> None:
        """The recordings were dropped."""
        self._recorded.clear()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self._buffers).items():
            if isinstance(value, Tensor):
                yield f"buffer {name}", value
            else:
                yield from ((f"buffer {name}, group {group}", tensor) for group, tensor in enumerate(value))
        yield "buffer prefixes", self._prefixes.memory
        yield from self._others.items()
        for name, module in self._model.named_modules():
            if isinstance(module, CachedLayer) and module.kv_cache is not None:
                yield f"KV cache of {name}", module.kv_cache
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
