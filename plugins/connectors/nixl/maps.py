"""Which bytes of another engine's blocks go where in this one's, whatever ranks and block sizes divide them.

Pure: knows no memory but by addresses. The two engines keep the same of each token (see `nixl_shapes.difference`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from .shapes import BlockShape, Facts, LayerShape

#: Most pieces of memory that one read may have: of small pieces, as of single tokens' heads, there may be very many.
MAX_ROWS = 1 << 22
#: Pieces of fewer bytes are not worth a read: all numbers of a head have more.
_LEAST_BYTES = 16


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What this rank reads of a layer from rank `rank` of the other engine: heads `first` to before `last`.

    `ours` and `theirs` are the layer's places in the lists of the ranks. Heads are numbered over all ranks; with
    `first` == `last` all that a rank keeps is read.
    """

    ours: int
    rank: int
    theirs: int
    first: int
    last: int


def pieces(prefill: Facts, decode: Facts, rank: int) -> list[Piece]:
    """What that rank of `decode` reads: each of its heads once. Of ranks that keep the same it takes one by its number.

    Raises `ValueError` with what keeps it from that: a sentence's end, after "the engines differ in".
    """
    places = [{layer.name: place for place, layer in enumerate(layers)} for layers in prefill.ranks]
    found = []
    for number, ours in enumerate(decode.ranks[rank]):
        having = [
            (other, places[other][ours.name], prefill.ranks[other][places[other][ours.name]])
            for other in range(len(prefill.ranks))
            if ours.name in places[other]
        ]
        if ours.first == ours.last:
            other, place, _ = _all_of(having, ours, rank, len(decode.ranks) == len(prefill.ranks))
            found.append(Piece(number, other, place, 0, 0))
            continue
        head = ours.first
        while head < ours.last:
            holders = [one for one in having if one[2].first <= head < one[2].last]
            if not holders:
                raise ValueError(f"head {head} of layer {ours.name} is on none of the ranks")
            other, place, theirs = holders[rank % len(holders)]
            found.append(Piece(number, other, place, head, min(theirs.last, ours.last)))
            head = theirs.last
    return found


def check_orders(prefill: Facts, decode: Facts) -> None:
    """Raises `ValueError`, as `pieces`, where the blocks of a layer have too little in common to be read by pieces."""
    theirs = prefill.by_name
    layers = {(layer.block, theirs[name].block): name for name, layer in decode.by_name.items() if name in theirs}
    for (ours, other), name in layers.items():
        here, there = decode.blocks[ours], prefill.blocks[other]
        if here == there:
            continue  # they are read whole
        _, _, size = _runs(Side(here, 1, 0, 0, 0), Side(there, 1, 0, 0, 0), (0, 1), 1)
        if size < min(_LEAST_BYTES, here.item_bytes * here.shape[-1]):
            raise ValueError(
                f"the order of a block's axes, of layer {name}: {there.order} at the prefill engine, {here.order} at "
                f"the decode engine, so that only {size} bytes lie side by side in both"
            )


def groups_of(prefill: Facts, decode: Facts) -> list[tuple[int, int]]:
    """Pairs of a group of `decode` and one of `prefill` that have a layer in common."""
    theirs = prefill.by_name
    return sorted({(layer.group, theirs[name].group) for name, layer in decode.by_name.items()})


def _all_of(
    having: Sequence[tuple[int, int, LayerShape]], ours: LayerShape, rank: int, even: bool
) -> tuple[int, int, LayerShape]:
    """The rank from which to read all of a layer."""
    if not having:
        raise ValueError(f"layer {ours.name} is on none of the ranks")
    if not ours.total:
        return having[rank % len(having)]
    # the backend does not say which heads a rank keeps, so only a rank of the same number has the same
    own = next((one for one in having if one[0] == rank), None)
    if not even or own is None:
        sizes = "tensor_parallel_size or pipeline_parallel_size"
        raise ValueError(f"{sizes}, and the attention backend of layer {ours.name} tells no axis of heads")
    return own


@dataclass(frozen=True)
class Side:
    """A layer in one engine: how its blocks lie, where, and the first of its heads."""

    block: BlockShape
    block_size: int
    first_head: int
    address: int
    stride: int


@dataclass(frozen=True)
class Rows:
    """Pieces of memory to copy, each of `sizes[i]` bytes from `theirs[i]` to `ours[i]`, int64 addresses."""

    ours: np.ndarray
    theirs: np.ndarray
    sizes: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """All of them, in order."""
        names = ("ours", "theirs", "sizes")
        return cls(*(np.concatenate([getattr(one, name) for one in parts] or [_NOTHING]) for name in names))


@dataclass(frozen=True)
class LayerRows:
    """The same `pieces` of each layer, behind its `addresses`: int64 [layers, 2], ours and theirs.

    They need not be told one by one, so that a read of many layers begins before there is a list of all its pieces.
    """

    addresses: np.ndarray
    pieces: Rows

    def __len__(self) -> int:
        return len(self.addresses) * len(self.pieces.sizes)

    def told(self) -> Rows:
        """All of them."""
        ours, theirs = self.addresses.T[:, :, None]
        sizes = np.tile(self.pieces.sizes, len(self.addresses))
        return Rows((ours + self.pieces.ours).reshape(-1), (theirs + self.pieces.theirs).reshape(-1), sizes)


_NOTHING = np.zeros(0, np.int64)


def rows(
    ours: Side, theirs: Side, heads: tuple[int, int], tokens: range, our_blocks: np.ndarray, their_blocks: np.ndarray
) -> Rows:
    """What to copy of a layer's `tokens`, whose first is the first of `our_blocks[0]`, and is in `their_blocks[0]`.

    Tokens in a block 0, on either side, are left out. `heads` are those of a `Piece`.
    """
    unit = math.gcd(ours.block_size, theirs.block_size)
    starts = np.arange(tokens.start, tokens.stop, unit)
    here = our_blocks[starts // ours.block_size - tokens.start // ours.block_size]
    there = their_blocks[starts // theirs.block_size - tokens.start // theirs.block_size]
    kept = (here != 0) & (there != 0)
    starts, here, there = starts[kept], here[kept], there[kept]
    first_ours, first_theirs, size = _runs(ours, theirs, heads, unit)
    if len(starts) * len(first_ours) > MAX_ROWS:
        raise ValueError(f"they are {len(starts) * len(first_ours)} pieces of {size} bytes")
    bases_ours = ours.address + here * ours.stride + starts % ours.block_size * _token_bytes(ours)
    bases_theirs = theirs.address + there * theirs.stride + starts % theirs.block_size * _token_bytes(theirs)
    return _merged(
        (bases_ours[:, None] + first_ours).reshape(-1), (bases_theirs[:, None] + first_theirs).reshape(-1), size
    )


def _token_bytes(side: Side) -> int:
    """Bytes between tokens; 0 where blocks are copied whole."""
    axis = side.block.token_axis
    return 0 if axis is None else side.block.strides[axis]


def _runs(ours: Side, theirs: Side, heads: tuple[int, int], unit: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(offsets in our block, in theirs, bytes): the pieces of `unit` tokens that lie in one piece on both sides."""
    steps = list(zip(ours.block.strides, theirs.block.strides, strict=True))
    lengths, begin_ours, begin_theirs = list(ours.block.shape), 0, 0
    if (axis := ours.block.token_axis) is not None:
        lengths[axis] = unit
    if (axis := ours.block.head_axis) is not None and heads[0] < heads[1]:
        lengths[axis] = heads[1] - heads[0]
        begin_ours = (heads[0] - ours.first_head) * steps[axis][0]
        begin_theirs = (heads[0] - theirs.first_head) * steps[axis][1]
    size, outer = ours.block.item_bytes, list[tuple[int, int, int]]()
    for length, (step, their_step) in sorted(zip(lengths, steps, strict=True), key=lambda one: one[1]):
        if length == 1:
            continue
        if not outer and step == their_step == size:
            size *= length
        else:
            outer.append((length, step, their_step))
    offsets, their_offsets = np.array([begin_ours]), np.array([begin_theirs])
    for length, step, their_step in reversed(outer):
        numbers = np.arange(length)
        offsets = (offsets[:, None] + numbers * step).reshape(-1)
        their_offsets = (their_offsets[:, None] + numbers * their_step).reshape(-1)
    return offsets, their_offsets, size


def _merged(ours: np.ndarray, theirs: np.ndarray, size: int) -> Rows:
    """Pieces of `size` bytes as the longest that lie side by side in both engines."""
    order = np.argsort(ours, kind="stable")
    ours, theirs = ours[order], theirs[order]
    if not len(ours):
        return Rows(_NOTHING, _NOTHING, _NOTHING)
    apart = (np.diff(ours) != size) | (np.diff(theirs) != size)
    firsts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    counts = np.diff(np.append(firsts, len(ours)))
    return Rows(ours[firsts], theirs[firsts], counts * size)


def readers(found: Sequence[Sequence[Piece]]) -> list[list[int]]:
    """The ranks of the other engine that each rank here reads from, in order, by what each reads."""
    return [sorted({one.rank for one in some}) for some in found]


def of_rank(found: Sequence[Piece], rank: int) -> Iterator[Piece]:
    """Those that are read from that rank."""
    return (one for one in found if one.rank == rank)
