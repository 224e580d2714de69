"""How the layers of one worker lie in a row, and which bytes of the rows of other workers belong there.

Engines that divide a model over other numbers of ranks hold the same blocks by other ranges of heads. Pure; knows no
file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from frame.interfaces import BlockFormat, CacheView, KVLayout, Mesh, decode, encode

from ..blocks.step_worker import Part, Stored

#: Most workers of an engine, bytes that say the form of a row, bytes of a row, and axes of a block.
MOST_RANKS, MOST_FORM_BYTES, _MOST_ROW_BYTES, _MOST_AXES = 1024, 1 << 20, 1 << 40, 8


class LayerForm(msgspec.Struct, frozen=True, array_like=True):
    """`count` blocks of a layer, of `block_bytes` each, lie from `start` on; the rest is as in `CacheView`.

    Of a state it is a run of rows of a tensor, which are as heads.
    """

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

    def check(self, row_bytes: int) -> None:
        """Raises `ValueError` where this can be of no row of so many bytes."""
        axes, first, last = len(self.shape), *(self.heads or (0, 0))
        wrong = (
            not 0 < axes <= _MOST_AXES or sorted(self.order) != list(range(axes)) or not 0 <= self.block_axis <= axes
        )
        if wrong or min(self.count, self.block_bytes, *self.shape) < 1 or self.start < 0:
            raise ValueError("a layer has a shape that cannot be")
        needed = math.prod(self.shape) * dtype_of(self.dtype).itemsize
        if needed > self.block_bytes or self.start + self.count * self.block_bytes > row_bytes:
            raise ValueError("a layer has more bytes than there are")
        if self.head_axis is not None and not 0 <= self.head_axis < axes:
            raise ValueError("a layer has an axis that there is not")
        count = None if self.head_axis is None or self.heads is None else self.shape[self.head_axis]
        if count is not None and (not 0 <= first < last <= self.total_heads or count != last - first):
            raise ValueError("a layer has heads that there are not")


class RowForm(msgspec.Struct, frozen=True, array_like=True):
    """A row of one worker."""

    row_bytes: int
    layers: list[LayerForm]

    @classmethod
    def read(cls, data: bytes) -> RowForm:
        """What another engine wrote of itself; raises `ValueError` where it can be of no row."""
        if len(data) > MOST_FORM_BYTES:
            raise ValueError("a form has more bytes than it may")
        try:
            form = decode(data, cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError("what should be a form is none") from error
        form.check()
        return form

    def check(self) -> None:
        """Raises `ValueError` where this can be of no row."""
        if not 0 <= self.row_bytes <= _MOST_ROW_BYTES:
            raise ValueError("a row has a size that cannot be")
        for layer in self.layers:
            layer.check(self.row_bytes)

    @property
    def digest(self) -> bytes:
        """Stands for all of it, so that a row is not taken for one of another form: 16 bytes."""
        return hashlib.blake2b(encode(self), digest_size=16).digest()


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


def family_of(forms: Iterable[RowForm]) -> bytes:
    """Equal where the rows of engines hold the same layers in the same way, but for how they are divided: 16 bytes."""
    facts = {encode([layer.name, *layer.kind]) for form in forms for layer in form.layers}
    return hashlib.blake2b(encode(sorted(facts)), digest_size=16).digest()


def form_of(parts: Sequence[Part], caches: Mapping[str, CacheView], owner: str) -> RowForm:
    """The form of rows whose `parts` are those of `caches` that keep tokens.

    Of a layer whose heads are not told only the worker that is `owner` of an equal engine has the same part.
    """
    layers = [
        LayerForm(
            f"{part.layer} of {owner}" if view.heads is None and view.total_heads else part.layer,
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
        for part in parts
        for view in (caches[part.layer],)
    ]
    return RowForm(parts[-1].end if parts else 0, layers)


def state_form(states: Stored, caches: Mapping[str, CacheView], owner: str) -> RowForm:
    """The form of rows of `states`, of the layers of `caches`: the rows of a tensor that ranks divide are as heads.

    Of a tensor whose runs are not told only the worker that is `owner` of an equal engine has the same part.
    """
    return RowForm(states.num_bytes, [form for part in states.parts for form in _runs(part, caches[part.layer], owner)])


def _runs(part: Part, view: CacheView, owner: str) -> Iterator[LayerForm]:
    """The runs of a tensor, by their numbers in the layer."""
    end, place, told = part.place + part.end - part.start, 0, list[LayerForm]()
    for number, run in enumerate(view.runs):
        shape = (run.last - run.first, run.row_bytes // run.dtype.itemsize)
        size = shape[0] * run.row_bytes
        if run.dtype == part.dtype and part.place <= place and place + size <= end:
            start, heads = part.start + place - part.place, (run.first, run.last)
            name, kind = f"{part.layer}#{number}", str(run.dtype)
            told.append(LayerForm(name, start, 1, size, shape, (0, 1), kind, 0, 0, heads, run.total))
        place += size
    if sum(one.block_bytes for one in told) == end - part.place:
        yield from told
    else:
        size, name = end - part.place, f"{part.layer} from {part.place} of {owner}"
        count = size // part.dtype.itemsize
        yield LayerForm(name, part.start, 1, size, (count,), (0,), str(part.dtype), 0, None, None, 0)


def pieces_of(own: RowForm, others: Sequence[RowForm]) -> list[Piece] | None:
    """Where each layer and each head of `own` lies in the rows of `others`; None where something is missing."""
    pieces, having = [], dict[str, list[tuple[int, int, LayerForm]]]()
    for place, form in enumerate(others):
        for number, theirs in enumerate(form.layers):
            having.setdefault(theirs.name, []).append((place, number, theirs))
    for index, layer in enumerate(own.layers):
        there = [one for one in having.get(layer.name, ()) if one[2].kind == layer.kind]
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
    """Blocks by their axes, with one behind them for the bytes of an element: a row may begin anywhere in memory."""
    size, order = dtype_of(layer.dtype).itemsize, (*layer.order, len(layer.shape))
    return BlockFormat((*layer.shape, size), order, torch.uint8, layer.block_axis).view(_blocks(layer, row))


def dtype_of(name: str) -> torch.dtype:
    """The element type of that name; raises `ValueError` where there is none."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no elements have the type {name}")
    return found
