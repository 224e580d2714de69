"""A layer that keeps something of each request between steps, in a cache that the worker gives it.

Such layers share their name, the number of their plan among the plans of a step, and the hooks called around `compute`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, dtype, empty, nn

from ..interfaces.attention import BlockFormat, GroupBatch
from ..interfaces.kv import AnyKVSpec
from ..interfaces.latent import CacheSpec
from ..interfaces.model import ForwardStep

if TYPE_CHECKING:
    from .build import Build

#: The cache of layers that keep nothing, or that are tried before there is memory.
NO_CACHE = empty(0)


class Planner(Protocol):
    """Makes the plan of a step, once, for all layers that share it: an attention backend, or a part of a layer's own.

    `needs_python` says that its work, and that of the layers, cannot be replayed as a CUDA graph.
    """

    needs_python: bool

    def plan(self, batch: GroupBatch) -> Any:
        """What `CachedLayer.compute` gets in each layer of this step."""


class CachedLayer(nn.Module, ABC):
    """Made with the build and its name, the checkpoint prefix, which is unique in a model (else `ValueError`).

    Layers of a KV group with equal `backend_spec` share a plan. One without a `backend_spec` needs no plugin: its
    `planner(None)` plans for it, and for others of its class and `kv_spec`. What keeps two caches is two layers.
    """

    #: what the layer asks of an attention backend; None: it needs none
    backend_spec: CacheSpec | None = None
    #: whether it computes the tokens of an encoder that decoders of other layers attend to; it keeps nothing
    of_encoder: bool = False
    #: the first of the model's KV heads that this rank caches, and how many the model has; (0, 0) without such heads
    kv_heads: tuple[int, int] = (0, 0)
    #: element types and bytes of the tensors in a block of a layer that keeps a state, one behind the other, if known
    cache_parts: tuple[tuple[dtype, int], ...] = ()

    def __init__(self, build: Build, name: str) -> None:
        super().__init__()
        self.name = name
        self.plan_index = -1
        self.planned_by: Planner | None = None
        self.kv_cache: Tensor | None = None
        build.add_cache(self)

    @abstractmethod
    def kv_spec(self) -> AnyKVSpec | None:
        """What the layer keeps in its cache; None where it keeps nothing, as an encoder's attention."""

    def planner(self, backend: Planner | None) -> Planner:
        """The object whose `plan` is called once a step: by default the backend chosen for `backend_spec`."""
        if backend is None:
            raise RuntimeError(f"layer {self.name!r} has no backend and plans nothing itself")
        return backend

    def bind(self, cache: Tensor | None, block: BlockFormat | None, plan: int, planner: Planner) -> None:
        """Called by the worker once memory is there, and again when it moved.

        `cache` uint8 [num_blocks, block_bytes] holds blocks of the format `block`, or raw bytes where that is None, as
        for layers without a backend; it is None for a layer that keeps nothing. `plan` is the number of its plan.
        """
        self.plan_index, self.planned_by = plan, planner
        self.kv_cache = cache if cache is None or block is None else block.view(cache)

    @abstractmethod
    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        """Computes the output, whose first axis is as long as that of the first tensor, and writes the cache."""

    def forward(self, *tensors: Tensor, step: ForwardStep) -> Tensor:
        """`compute` with the step's plan and the hooks around it, called through `step.attend`."""
        out: Tensor = step.attend(self._run, *tensors, step)
        return out

    def _run(self, *arguments: Any) -> Tensor:
        *tensors, step = arguments
        if self.planned_by is None:
            raise RuntimeError(f"layer {self.name!r} has no backend: bind() was not called")
        index = self.plan_index
        step.hooks.before(self.name, step.batches[index])
        out = self.compute(step.plans[index], *tensors)
        if len(out) != len(tensors[0]):  # one token would be added to all others without a word
            raise ValueError(
                f"{type(self.planned_by).__name__} gave layer {self.name!r} an output of shape {list(out.shape)} for "
                f"{len(tensors[0])} tokens"
            )
        step.hooks.after(self.name, step.batches[index])
        return out
