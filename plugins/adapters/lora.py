"""LoRA: y += scale · (x Aᵀ) Bᵀ in the layers of a model, with other A and B for each token (Hu et al. 2021).

Each layer holds the matrices of all slots, padded to the highest rank. Ranks that divide a layer by its outputs hold
all of A and their rows of B, or their rows of both, and gather what comes between, if adapters are `fully_sharded`;
those that divide it by its inputs their columns of A and all of B, so that what the adapter adds joins the sum over
ranks. Knows no request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import (
    Adapters,
    AdapterSetup,
    ExpertMethod,
    ExpertSpec,
    Gated,
    LinearMethod,
    LinearSpec,
    ProcessGroup,
    ReadAdapter,
)
from frame.layers import WeightSlot
from frame.ops import AdapterWeights, Norm, SlotGroups

from .experts import AdaptedExperts
from .joined import JoinedExperts
from .lora_options import LoraOptions
from .peft import Matrices, Taken, read_adapter
from .shared_product import SharedProduct, fits

logger = logging.getLogger("frame.adapters")

#: Most outputs of a span of `AdapterWeights`: a kernel's program computes one.
SPAN = 128


class LoraAdapters(Adapters):
    """The adapters of one worker, in PEFT's folders."""

    def __init__(self, setup: AdapterSetup, options: LoraOptions | None = None) -> None:
        self._setup, self._options = setup, options or LoraOptions()
        shares = self._options.shared_products
        self._shares = setup.device.type == "cuda" if shares is None else shares
        self.max_adapters = setup.max_adapters
        self.groups = SlotGroups.allocate(setup.max_num_tokens, setup.max_adapters, setup.device)
        self.read_groups = SlotGroups.allocate(
            0, setup.max_adapters, setup.device
        )  # of the tokens that an encoder reads
        self.layers: list[AdaptedLinear | AdaptedExperts] = []
        self._unadapted: dict[str, str] = {}  # layers of experts that take no adapters, and why
        #: how many tokens the step has for which `groups` were filled
        self.num_tokens = 0

    @property
    def slots(self) -> Tensor:
        return self.groups.slots

    def linear(self, prefix: str, spec: LinearSpec, inner: LinearMethod) -> LinearMethod:
        layer = AdaptedLinear(self, spec, inner, self._setup, shares=self._shares)
        self.layers.append(layer)
        return layer

    def experts(self, prefix: str, spec: ExpertSpec, inner: ExpertMethod) -> ExpertMethod:
        if not self._options.experts:
            self._unadapted[prefix] = "--plugin.lora.experts is false"
            return inner
        layer = AdaptedExperts(prefix, spec, inner, self._setup, self)
        self.layers.append(layer)
        return layer

    @property
    def expert_bytes(self) -> int:
        """What the adapters of routed experts take on this device, as far as layers are made."""
        return sum(layer.num_bytes for layer in self.layers if isinstance(layer, AdaptedExperts))

    def tokens(self) -> Tensor | None:
        """The slots of the step's tokens; None in a step without adapters."""
        return self.slots[: self.num_tokens] if self.active else None

    def prepare(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._setup.ops.group_slots(self.groups, num_tokens)

    def prepare_read(self, slots: Tensor) -> None:
        made = SlotGroups.allocate(len(slots), self.max_adapters, self._setup.device)
        self.read_groups = replace(made, slots=slots)
        self._setup.ops.group_slots(self.read_groups, len(slots))

    def read(self, folder: Path) -> ReadAdapter:
        setup = self._setup
        layers: dict[str, list[AdaptedLinear | AdaptedExperts]] = {}
        sizes: dict[str, tuple[int, int]] = {}
        experts = [layer for layer in self.layers if isinstance(layer, AdaptedExperts)]
        refused = self._unadapted | {layer.prefix: layer.refused for layer in experts if layer.refused}
        for layer in self.layers:
            if isinstance(layer, AdaptedExperts) and layer.refused:
                continue
            sizes.update(layer.sizes)
            for name in layer.sizes:
                layers.setdefault(name, []).append(layer)
        joined = {layer.prefix: JoinedExperts(layer.prefix, layer.spec) for layer in experts if not layer.refused}
        taken = Taken(sizes, setup.max_rank, setup.renames, joined, refused)
        digest, found, config = read_adapter(folder, taken)
        if config.base_model and _last(config.base_model) != _last(setup.base_model) != "":
            logger.warning(
                "the adapter %s was made for the model %r, and the one that is served is %r",
                folder, config.base_model, setup.base_model,
            )  # fmt: skip
        by_layer: dict[int, dict[str, Matrices]] = {}
        for name, matrices in found.items():
            for layer in layers[name]:
                by_layer.setdefault(id(layer), {})[name] = matrices
        places = {id(layer): place for place, layer in enumerate(self.layers)}
        pin = setup.device.type == "cuda"
        shares = {str(places[key]): self.layers[places[key]].share(some, pin) for key, some in by_layer.items()}
        return ReadAdapter(digest, shares)

    def load(self, slot: int, adapter: ReadAdapter) -> None:
        for place, layer in enumerate(self.layers):
            layer.load(slot, adapter.tensors.get(str(place)))


class AdaptedLinear(LinearMethod):
    """`inner` and what the adapters of a step add to it.

    `parts` are the checkpoint tensors of the layer, each with a number; a tensor of which a rank holds several runs of
    rows has one A for all of them. `sizes` are the inputs and outputs of each in the checkpoint.
    """

    def __init__(
        self, owner: LoraAdapters, spec: LinearSpec, inner: LinearMethod, setup: AdapterSetup, *, shares: bool = False
    ) -> None:
        self._owner, self._inner, self._setup, self._shares = owner, inner, setup, shares
        self.spec, self._reads = spec, owner.reads
        self.parts = {name: place for place, name in enumerate(dict.fromkeys(rows.name for rows in spec.rows))}
        self.sizes = {rows.name: (spec.in_features, rows.total) for rows in spec.rows}
        self.stages = inner.stages  # type: ignore[misc]  # of the method that it wraps
        self._own, self._rank = (
            slice(0, setup.max_rank),
            setup.max_rank,
        )  # rows of each A that are here, and all of them
        self._weights: AdapterWeights | None = None
        self._spans = torch.empty(0)
        self._shared: SharedProduct | None = None
        self._halves = len({rows.count for rows in spec.rows}) == 1 and len(spec.rows) == 2

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]
        return not self._owner.active and self._inner.takes_parts

    def create(self, layer: Any) -> list[WeightSlot]:
        count, device, gather = self._setup.max_adapters, layer.device, None
        if self._setup.fully_sharded and any(rows.count < rows.total for rows in self.spec.rows):
            size = -(-self._setup.max_rank // layer.group.size)
            self._own, self._rank = (
                slice(layer.group.rank * size, (layer.group.rank + 1) * size),
                layer.group.size * size,
            )
            gather = partial(self._gathered, layer.group)
        height = len(self.parts) * (self._own.stop - self._own.start)
        slots, down = self._first_matrices(layer, count, height, shares=gather is None)
        up = torch.zeros(count, self.spec.out_features, self._rank, dtype=layer.dtype, device=device)
        runs, pieces, start = list[tuple[int, int, int]](), list[tuple[int, int, int]](), 0
        for rows in self.spec.rows:
            stop, part = start + rows.count, self.parts[rows.name]
            runs.append((start, stop, part))
            pieces += [(first, min(first + SPAN, stop), part) for first in range(start, stop, SPAN)]
            start = stop
        self._spans = torch.tensor(pieces, dtype=torch.int32).view(-1, 3)
        spans = self._spans.to(device)
        for name, tensor in (("adapter_down", down), ("adapter_up", up), ("adapter_spans", spans)):
            layer.register_buffer(name, tensor, persistent=False)
        self._weights = AdapterWeights(down, up, spans, tuple(runs), gather)
        return slots

    def _first_matrices(self, layer: Any, count: int, height: int, *, shares: bool) -> tuple[list[WeightSlot], Tensor]:
        """The slots of the layer's own weight, and the memory of A [count, height, width]."""
        if shares and self._shares and fits(self.spec, self._inner, self._setup, count * height):
            self._shared = SharedProduct(layer, count * height)
            return self._shared.weight_slots(layer), self._shared.down.view(count, height, -1)
        shape = count, height, self.spec.width
        return self._inner.create(layer), torch.zeros(shape, dtype=layer.dtype, device=layer.device)

    def _gathered(self, group: ProcessGroup, inner: Tensor) -> Tensor:
        """Of every part all rows of A, from [T, P · this rank's rows]."""
        every = group.all_gather(inner).view(len(inner), group.size, len(self.parts), -1)
        return every.transpose(1, 2).reshape(len(inner), -1)

    def begin_load(self, layer: Any) -> None:
        self._inner.begin_load(layer)

    def finish_load(self, layer: Any) -> None:
        self._inner.finish_load(layer)

    def pack(self, layer: Any) -> None:
        if self._shared is not None:
            self._shared.pack(layer)
        else:
            self._inner.pack(layer)

    def unpack(self, layer: Any) -> None:
        self._inner.unpack(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if (shared := self._sharing(layer, bias)) is None:
            return self._added(layer, self._inner.apply(layer, x, bias), x)
        return self._behind(layer, layer.ops.linear(x, *shared))

    def apply_into(self, layer: Any, out: Tensor, x: Tensor) -> Tensor:
        return self._added(layer, self._inner.apply_into(layer, out, x), x)

    def apply_gated(self, layer: Any, x: Tensor, bias: Tensor | None, activation: Gated = "silu") -> Tensor:
        if not self._owner.active:
            return self._inner.apply_gated(layer, x, bias, activation)
        if activation != "silu" or not self._halves or (shared := self._sharing(layer, bias)) is None:
            return super().apply_gated(layer, x, bias, activation)
        return self._behind(layer, layer.ops.linear(x, *shared), halves=True)

    def apply_normed(
        self, layer: Any, x: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._owner.active:
            return self._inner.apply_normed(layer, x, residual, norm, bias)
        if (shared := self._sharing(layer, bias)) is None:
            return super().apply_normed(layer, x, residual, norm, bias)
        joined, normed, total = layer.ops.norm_linear(x, residual, norm, *shared)
        return self._behind(layer, joined), normed, total

    def apply_normed_gated(
        self, layer: Any, x: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not self._owner.active:
            return self._inner.apply_normed_gated(layer, x, residual, norm, bias)
        if not self._halves or (shared := self._sharing(layer, bias)) is None:
            return super().apply_normed_gated(layer, x, residual, norm, bias)
        joined, _, total = layer.ops.norm_linear(x, residual, norm, *shared)
        return self._behind(layer, joined, halves=True), total

    def _sharing(self, layer: Any, bias: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        """In a step with adapters: the layer's weight and bias with A behind them, where one product takes both."""
        return self._shared.given(layer, bias) if self._shared is not None and self._owner.active else None

    def _behind(self, layer: Any, joined: Tensor, *, halves: bool = False) -> Tensor:
        """What is made of a product with A behind it; of its `halves`, gated."""
        groups = self._groups_of(joined)
        out: Tensor = layer.ops.add_joined_adapters(joined, self._weights, groups, halves=halves)
        return out

    def _added(self, layer: Any, y: Tensor, x: Tensor) -> Tensor:
        if not self._owner.active or self._weights is None:
            return y
        out: Tensor = layer.ops.add_adapters(y, x, self._weights, self._groups_of(x))
        return out

    def _groups_of(self, rows: Tensor) -> SlotGroups:
        """The slots of a step's tokens, which are `rows`."""
        owner = self._owner
        groups, count = (
            (owner.read_groups, len(owner.read_groups.slots)) if self._reads else (owner.groups, owner.num_tokens)
        )
        if rows.dim() != 2 or len(rows) != count:
            raise RuntimeError(
                f"{self.spec.prefix} computes {tuple(rows.shape)} in a step of {count} tokens, so that it is not known "
                "which adapters are its rows'"
            )
        return groups

    def share(self, found: dict[str, Matrices], pin: bool) -> tuple[Tensor, Tensor]:
        """What this rank holds of an adapter's matrices, (down, up) of one slot, in host memory."""
        height, dtype = self._own.stop - self._own.start, self._setup.dtype
        down = torch.zeros(len(self.parts) * height, self.spec.width, dtype=dtype)
        up = torch.zeros(self.spec.out_features, self._rank, dtype=dtype)
        for name, matrices in found.items():
            first, lines = self.parts[name] * height, matrices.down[self._own]
            down[first : first + len(lines)] = lines[:, self.spec.columns].to(dtype)
        start = 0
        for rows in self.spec.rows:
            if (own := found.get(rows.name)) is not None:
                taken = own.up[rows.start : rows.start + rows.count]
                up[start : start + rows.count, : own.rank] = (taken.float() * own.scale).to(dtype)
            start += rows.count
        if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
            raise ValueError(f"the adapter of {', '.join(found)} has values or a scale that {dtype} cannot hold"[:300])
        return (down.pin_memory(), up.pin_memory()) if pin else (down, up)

    def load(self, slot: int, share: Sequence[Tensor] | None) -> None:
        """Slot `slot` gets what `share` returned, or nothing; a layer of another pipeline stage has no memory."""
        weights = self._weights
        if weights is None or weights.down.is_meta:
            return
        weights.spans.copy_(self._spans)  # sleep may have dropped what lay on the device
        for own, given in zip((weights.down, weights.up), share or (None, None), strict=True):
            if given is None:
                own[slot - 1].zero_()
            else:
                own[slot - 1].copy_(given, non_blocking=True)


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
