"""How the layers of one worker lie in a row, and which bytes of the rows of other workers belong there.

Engines that divide a model over other numbers of ranks hold the same blocks by other ranges of heads. Pure; knows no
file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from frame.interfaces import BlockFormat, CacheView, KVLayout, Mesh, encode

from ..blocks.step_worker import Part, Stored


class LayerForm(msgspec.Struct, frozen=True, array_like=True):
    """`count` blocks of a layer, of `block_bytes` each, lie from `start` on; the rest is as in `CacheView`."""

    name: str
    start: int
    count: int
    block_bytes: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: str
    block_axis: int
    head_axis: int | None
    heads: tuple[int, int] | None
    total_heads: int

    @property
    def kind(self) -> list[object]:
        """What is equal however the heads are divided."""
        whole = self.head_axis is None or self.heads is None
        shape = self.shape if whole else (*self.shape[: self.head_axis], 0, *self.shape[(self.head_axis or 0) + 1 :])
        size = self.block_bytes if whole else 0
        return [
            self.count,
            size,
            shape,
            self.order,
            self.dtype,
            self.block_axis,
            self.head_axis,
            whole,
            self.total_heads,
        ]


class RowForm(msgspec.Struct, frozen=True, array_like=True):
    """A row of one worker."""

    row_bytes: int
    layers: list[LayerForm]

    @property
    def digest(self) -> bytes:
        """Stands for all of it, so that a row is not taken for one of another form: 16 bytes."""
        return hashlib.blake2b(encode(self), digest_size=16).digest()

    @property
    def family(self) -> bytes:
        """Equal where rows hold the same layers in the same way but for the heads: 16 bytes."""
        facts = [[layer.name, *layer.kind] for layer in self.layers]
        return hashlib.blake2b(encode(facts), digest_size=16).digest()


@dataclass(frozen=True)
class Piece:
    """`count` heads of layer `own`, from `first` on, are those from `their_first` on of layer `theirs` at `place`.

    Without heads (`count` 0) it is all of the layer.
    """

    own: int
    place: int
    theirs: int
    first: int = 0
    their_first: int = 0
    count: int = 0


def space_name(layout: KVLayout, parts: int) -> str:
    """Where engines keep shelves that may hold blocks for one another, however the model is divided."""
    facts = [layout.model, layout.grain, parts, [[group.layers, group.block_size] for group in layout.groups]]
    return hashlib.sha256(encode(facts)).hexdigest()[:32]


def mesh_name(mesh: Mesh) -> str:
    """Ends the names of shelves whose engines divide the model alike."""
    return f"t{mesh.tensor}p{mesh.pipeline}"


def form_of(parts: Sequence[Part], caches: Mapping[str, CacheView], layout: KVLayout) -> RowForm:
    """The form of rows whose `parts` are those of `caches` that keep tokens, in the order of the layout."""
    groups = [group for group in layout.groups if not group.keeps_states]
    names = [layer for group in groups for layer in group.layers if layer in caches]
    layers = [
        LayerForm(
            name,
            part.start,
            part.count,
            part.cache.shape[1],
            view.format.shape,
            view.format.order,
            str(view.format.dtype),
            view.format.block_axis,
            view.format.head_axis,
            view.heads,
            view.total_heads,
        )
        for name, part in zip(names, parts, strict=True)
        for view in (caches[name],)
    ]
    return RowForm(parts[-1].end if parts else 0, layers)


def state_form(states: Stored, caches: Mapping[str, CacheView], layout: KVLayout, owner: str) -> RowForm:
    """The form of rows of `states`, of which only the worker that is `owner` of an equal engine has the same part.

    Where the tensors lie follows from the layers and their element types.
    """
    layers = [
        LayerForm(
            f"{name} of {owner}",
            0,
            1,
            view.bytes.shape[1],
            view.format.shape,
            view.format.order,
            " ".join(f"{dtype}:{size}" for dtype, size in view.parts) or str(view.format.dtype),
            view.format.block_axis,
            None,
            None,
            view.total_heads,
        )
        for group in layout.groups
        if group.keeps_states
        for name in group.layers
        if name in caches
        for view in (caches[name],)
    ]
    return RowForm(states.num_bytes, layers)


def pieces_of(own: RowForm, others: Sequence[RowForm]) -> list[Piece] | None:
    """Where each layer and each head of `own` lies in the rows of `others`; None where something is missing."""
    pieces = []
    for index, layer in enumerate(own.layers):
        there = [
            (place, number, theirs)
            for place, form in enumerate(others)
            for number, theirs in enumerate(form.layers)
            if theirs.name == layer.name and theirs.kind == layer.kind
        ]
        if layer.heads is None or layer.head_axis is None:
            if not there:
                return None
            pieces.append(Piece(index, *there[0][:2]))
            continue
        head, end = layer.heads
        while head < end:
            found = next((one for one in there if (held := one[2].heads) and held[0] <= head < held[1]), None)
            if found is None:
                return None
            first, last = found[2].heads or (0, 0)
            count = min(end, last) - head
            pieces.append(Piece(index, *found[:2], head - layer.heads[0], head - first, count))
            head += count
    return pieces


def copy_pieces(
    pieces: Sequence[Piece], own: RowForm, row: Tensor, others: Mapping[int, tuple[RowForm, Tensor]]
) -> None:
    """Fills `row` uint8 [row_bytes] from the rows of others, by their places."""
    for piece in pieces:
        form, theirs = others[piece.place]
        to, start = own.layers[piece.own], form.layers[piece.theirs]
        if not piece.count:
            _blocks(to, row).copy_(_blocks(start, theirs))
            continue
        axis = (to.head_axis or 0) + (to.block_axis <= (to.head_axis or 0))
        _elements(to, row).narrow(axis, piece.first, piece.count).copy_(
            _elements(start, theirs).narrow(axis, piece.their_first, piece.count)
        )


def _blocks(layer: LayerForm, row: Tensor) -> Tensor:
    return row[layer.start : layer.start + layer.count * layer.block_bytes].view(layer.count, layer.block_bytes)


def _elements(layer: LayerForm, row: Tensor) -> Tensor:
    dtype = getattr(torch, layer.dtype.removeprefix("torch."))
    block = BlockFormat(layer.shape, layer.order, dtype, layer.block_axis, layer.head_axis)
    return replace(block).view(_blocks(layer, row))
