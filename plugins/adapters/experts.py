"""LoRA in routed experts: what a token's adapter adds to both products of each expert that the token has.

Each layer holds the matrices of all its experts for all slots, divided as the experts are: ranks that have whole
experts hold those of these, ranks that have a part of each expert B of their rows of gate and up, and A of their
columns of down, so that what is added joins the sum over ranks. In steps with adapters quantised experts are
dequantised, whatever kernels their method has. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from frame.interfaces import Activations, AdapterSetup, Dispatched, ExpertMethod, ExpertSpec
from frame.layers import WeightSlot
from frame.ops import ExpertAdapters

from .peft import Matrices

if TYPE_CHECKING:
    from .lora import LoraAdapters

#: The buffers of a layer, in the order of `ExpertAdapters`.
BUFFERS = ("adapter_inner_down", "adapter_inner_up", "adapter_outer_down", "adapter_outer_up")


class AdaptedExperts(ExpertMethod):
    """`inner` and what the adapters of a step add to it.

    `refused` says why these experts take no adapters, once `create` has seen how they are spread.
    """

    def __init__(
        self, prefix: str, spec: ExpertSpec, inner: ExpertMethod, setup: AdapterSetup, owner: LoraAdapters
    ) -> None:
        self.prefix, self.spec, self._inner, self._setup, self._owner = prefix, spec, inner, setup, owner
        self.layouts, self.stages = inner.layouts, inner.stages  # type: ignore[misc]  # of the method that it wraps
        self.takes_all_slots = inner.takes_all_slots  # type: ignore[misc]
        self.refused = "they have no memory for any"
        self.num_bytes = 0
        self._weights: ExpertAdapters | None = None
        self._held: list[int] = []
        self._rows = slice(0, 0)

    def create(self, layer: Any) -> None:
        self._inner.create(layer)
        self.refused = _refusal(layer, self._inner)
        if self.refused:
            return
        self._held, start = layer.held, layer.divided.rank * layer.width
        self._rows = slice(start, start + layer.width)
        shapes = self._shapes(layer.num_slots, layer.width)
        size = sum(torch.Size(shape).numel() for shape in shapes) * layer.dtype.itemsize
        try:
            tables = [torch.zeros(shape, dtype=layer.dtype, device=layer.device) for shape in shapes]
        except torch.OutOfMemoryError:
            raise ValueError(self._too_large(layer, size)) from None
        self.num_bytes = 0 if tables[0].is_meta else size
        for name, table in zip(BUFFERS, tables, strict=True):
            layer.register_buffer(name, table, persistent=False)
        self._weights = ExpertAdapters(*tables)

    def _too_large(self, layer: Any, size: int) -> str:
        what = f"max_loras {self._setup.max_adapters} of max_lora_rank {self._setup.max_rank}"
        return (
            f"the adapters of routed experts do not fit {layer.device}: {what} take {size >> 20} MiB in each layer of "
            f"{layer.num_slots} experts, and {self._owner.expert_bytes >> 20} MiB are taken by layers before "
            f"{self.prefix}; lower one of the two, or serve no adapters of experts with --plugin.lora.experts false"
        )

    def _shapes(self, experts: int, width: int) -> list[tuple[int, ...]]:
        count, rank, hidden = self._setup.max_adapters, self._setup.max_rank, self.spec.hidden_size
        parts = len(self.spec.names) - 1
        return [
            (count, experts, parts * rank, hidden),
            (count, experts, parts * width, rank),
            (count, experts, rank, width),
            (count, experts, hidden, rank),
        ]

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        return self._inner.weight_slots(layer)

    def rows(self, layer: Any) -> list[Tensor]:
        return self._inner.rows(layer)

    def prepare(self, hidden: Tensor) -> Activations:
        return self._inner.prepare(hidden)

    def begin_load(self, layer: Any) -> None:
        self._inner.begin_load(layer)

    def finish_load(self, layer: Any) -> None:
        self._inner.finish_load(layer)

    def apply(self, layer: Any, dispatched: Dispatched) -> Tensor:
        tokens = self._owner.tokens()
        if tokens is None or self._weights is None:
            return self._inner.apply(layer, dispatched)
        values, weights, slots = dispatched.values, dispatched.weights, dispatched.slots
        held = self._inner.matrices(layer, values.dtype)
        if weights is None or slots is None or held is None or len(values) != len(tokens):
            raise RuntimeError(f"{self.prefix} computes {tuple(values.shape)} in a step of {len(tokens)} tokens")
        matrices, biases = held
        how: dict[str, Any] = {
            "of_all": layer.num_all_slots, "first": layer.base, "gating": self.spec.gating, "biases": biases
        }  # fmt: skip
        if not self.spec.weights_on_input:
            out: Tensor = layer.ops.adapted_experts(values, *matrices, weights, slots, self._weights, tokens, **how)
            return out
        top_k = slots.shape[1]
        scaled = (values[:, None] * weights[..., None]).to(values.dtype)  # [N, k, H]
        ones, each = weights.new_ones(weights.numel(), 1), slots.reshape(-1, 1)
        given = scaled.flatten(0, 1), *matrices, ones, each, self._weights, tokens.repeat_interleave(top_k)
        return layer.ops.adapted_experts(*given, **how).view(scaled.shape).sum(1)  # type: ignore[no-any-return]

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each tensor that takes an adapter, by its name in checkpoints."""
        *first, down = self.spec.names
        hidden, inner = self.spec.hidden_size, self.spec.intermediate_size
        sizes = {**dict.fromkeys(first, (hidden, inner)), down: (inner, hidden)}
        return {
            f"{self.prefix}.{expert}.{name}": size
            for expert in range(self.spec.num_experts)
            for name, size in sizes.items()
        }

    def share(self, found: dict[str, Matrices], pin: bool) -> tuple[Tensor, ...]:
        """What this rank holds of an adapter's matrices, one slot of each buffer, in host memory.

        Nothing of a layer of another pipeline stage.
        """
        if self._weights is None or self._weights.inner_down.is_meta:
            return ()
        rank, width, dtype = self._setup.max_rank, self._rows.stop - self._rows.start, self._setup.dtype
        tables = [
            torch.zeros(shape[1:], dtype=dtype) for shape in self._shapes(self._weights.inner_down.shape[1], width)
        ]
        inner_down, inner_up, outer_down, outer_up = tables
        *first, down = self.spec.names
        for local, expert in enumerate(self._held):
            for place, name in enumerate(first):
                if (own := found.get(f"{self.prefix}.{expert}.{name}")) is not None:
                    lines = slice(place * width, (place + 1) * width)
                    inner_down[local, place * rank : place * rank + own.rank] = own.down.to(dtype)
                    inner_up[local, lines, : own.rank] = (own.up[self._rows].float() * own.scale).to(dtype)
            if (own := found.get(f"{self.prefix}.{expert}.{down}")) is not None:
                outer_down[local, : own.rank] = own.down[:, self._rows].to(dtype)
                outer_up[local, :, : own.rank] = (own.up.float() * own.scale).to(dtype)
        if not all(torch.isfinite(table).all() for table in tables):
            raise ValueError(f"the adapter of {self.prefix} has values or a scale that {dtype} cannot hold")
        return tuple(table.pin_memory() for table in tables) if pin else tuple(tables)

    def load(self, slot: int, share: Sequence[Tensor] | None) -> None:
        """As `AdaptedLinear.load`."""
        weights = self._weights
        if weights is None or weights.inner_down.is_meta:
            return
        tables = (weights.inner_down, weights.inner_up, weights.outer_down, weights.outer_up)
        for own, given in zip(tables, share or (None,) * len(tables), strict=True):
            if given is None:
                own[slot - 1].zero_()
            else:
                own[slot - 1].copy_(given, non_blocking=True)


def _refusal(layer: Any, inner: ExpertMethod) -> str:
    """Why the experts of a layer take no adapters; empty where they do."""
    if not layer.local:
        return "they are spread over data ranks, to which tokens travel without their adapters"
    if layer.balanced:
        return "they are balanced between ranks, and adapters do not move with them (--enable-eplb)"
    kind = type(inner)
    if kind.matrices is ExpertMethod.matrices or kind.prepare is not ExpertMethod.prepare:
        return f"{kind.__name__} does not say what weights they have"
    return ""
