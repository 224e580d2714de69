"""What the layers of an engine keep, and how its ranks and blocks divide it: what two engines tell one another of that.

Compared before anything else is read; a difference that no map bridges is named with both values. Knows no address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from frame.interfaces import BlockFormat, CacheView, KVLayout

VERSION = 3
#: Most ranks of an engine, layers of a rank, and axes of a block.
MAX_RANKS, MAX_LAYERS, _MAX_AXES = 1024, 4096, 8
#: Most bytes of a block of one layer.
_MAX_BLOCK_BYTES = 1 << 32


class BlockShape(msgspec.Struct, frozen=True, array_like=True):
    """How a block of a layer lies in memory, in the words of `BlockFormat`."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: str
    item_bytes: int
    token_axis: int | None = None
    head_axis: int | None = None

    def __post_init__(self) -> None:
        count = len(self.shape)
        axes = [axis for axis in (self.token_axis, self.head_axis) if axis is not None]
        wrong = not 0 < count <= _MAX_AXES or sorted(self.order) != list(range(count)) or len(set(axes)) < len(axes)
        if wrong or min(self.item_bytes, *self.shape) < 1 or not all(0 <= axis < count for axis in axes):
            raise ValueError("a block has a shape that cannot be")
        if self.num_bytes > _MAX_BLOCK_BYTES:
            raise ValueError("a block has more bytes than it may")

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return self._bytes_from(0)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one to the next on each axis of `shape`."""
        place = {axis: number for number, axis in enumerate(self.order)}
        return tuple(self._bytes_from(place[axis] + 1) for axis in range(len(self.shape)))

    @property
    def rest(self) -> tuple[int, ...]:
        """The lengths of the axes that neither ranks nor block sizes divide, with 0 for those that they do."""
        return tuple(0 if axis in (self.token_axis, self.head_axis) else size for axis, size in enumerate(self.shape))

    def _bytes_from(self, place: int) -> int:
        size = self.item_bytes
        for axis in self.order[place:]:
            size *= self.shape[axis]
        return size


class GroupShape(msgspec.Struct, frozen=True, array_like=True):
    """A KV group: the tokens of its blocks, and how long its layers keep them (see `KVSpec.retention`)."""

    block_size: int
    keeps: str
    reach: int

    def __post_init__(self) -> None:
        if not 0 < self.block_size < 1 << 31:
            raise ValueError("a block has a number of tokens that cannot be")

    @property
    def keeps_states(self) -> bool:
        """Whether a request has one block, a state that stands for a multiple of `block_size` tokens."""
        return self.keeps == "state"

    def places(self, start: int, stop: int) -> range:
        """Where in a request's table the blocks are that tokens `start` to before `stop` need."""
        return range(1) if self.keeps_states else range(start // self.block_size, -(-stop // self.block_size))


class LayerShape(msgspec.Struct, frozen=True, array_like=True):
    """What a rank keeps of a layer: the numbers of its group and block shape, and heads `first` to before `last`.

    These are of `total` heads. With `first` == `last` every rank keeps all where `total` is 0; else it is not known
    where heads lie.
    """

    name: str
    group: int
    block: int
    first: int = 0
    last: int = 0
    total: int = 0


class RankShape(msgspec.Struct, frozen=True):
    """What a worker tells of its layers, in the order of its agent's."""

    blocks: list[BlockShape]
    layers: list[LayerShape]

    @classmethod
    def of(cls, views: Iterable[tuple[str, CacheView]]) -> RankShape:
        """That of layers with these caches."""
        blocks, layers = list[BlockShape](), []
        for name, view in views:
            one = view.format
            axes = one.token_axis, None if view.heads is None else one.head_axis
            # the tensors in a state have types of their own
            kinds = [f"{dtype}:{size}" for dtype, size in view.parts] or [str(one.dtype)]
            dtype = ",".join(kinds).replace("torch.", "")
            block = BlockShape(tuple(one.shape), tuple(one.order), dtype, one.dtype.itemsize, *axes)
            if block not in blocks:
                blocks.append(block)
            heads = view.heads or (0, 0)
            layers.append(LayerShape(name, view.group, blocks.index(block), *heads, view.total_heads))
        return cls(blocks, layers)


class Facts(msgspec.Struct, frozen=True):
    """An engine, for one that it exchanges blocks with. `exact` names what decides bits, "" where they need not agree.

    `ranks` are the layers of each; these count `blocks` and `groups`.
    """

    version: int
    model: str
    exact: str
    grain: int
    groups: list[GroupShape]
    blocks: list[BlockShape]
    ranks: list[list[LayerShape]]

    def __post_init__(self) -> None:
        layers = [layer for rank in self.ranks for layer in rank]
        if len(self.ranks) > MAX_RANKS or any(len(rank) > MAX_LAYERS for rank in self.ranks) or self.grain < 1:
            raise ValueError("an engine says more of itself than it may")
        for one in layers:
            if not (0 <= one.group < len(self.groups) and 0 <= one.block < len(self.blocks)):
                raise ValueError("a layer is in a group that there is not")
            block, group = self.blocks[one.block], self.groups[one.group]
            heads = 0 if block.head_axis is None else block.shape[block.head_axis]
            tokens = None if block.token_axis is None else block.shape[block.token_axis]
            if not 0 <= one.first <= one.last <= one.total or heads != one.last - one.first:
                raise ValueError("a layer has heads that there are not")
            if tokens not in (None, group.block_size):
                raise ValueError("a layer's block has other tokens than its group's")

    @classmethod
    def of(cls, layout: KVLayout, ranks: Sequence[RankShape], *, exact: bool) -> Facts:
        """Those of an engine whose workers have told theirs, by rank; `exact`: its bits do not depend on the batch."""
        groups = [GroupShape(group.block_size, *group.specs[0].retention) for group in layout.groups]
        blocks = list(dict.fromkeys(block for rank in ranks for block in rank.blocks))
        layers = [
            [msgspec.structs.replace(layer, block=blocks.index(rank.blocks[layer.block])) for layer in rank.layers]
            for rank in ranks
        ]
        return cls(VERSION, layout.model, layout.numerics if exact else "", layout.grain, groups, blocks, layers)

    @property
    def by_name(self) -> Mapping[str, LayerShape]:
        """Each layer, as one of the ranks that keep it has it."""
        return {layer.name: layer for rank in self.ranks for layer in rank}


def divided(name: str, view: CacheView, blocks: Tensor) -> Iterator[tuple[str, CacheView]]:
    """A layer as what its ranks divide: of a state each run of rows is one, as if these were heads; else itself.

    `blocks` [num_blocks, block_bytes] is its memory, or what stands for it.
    """
    if not view.runs:
        yield name, replace(view, bytes=blocks)
    start = 0
    for number, run in enumerate(view.runs):
        rows = run.last - run.first
        block = BlockFormat((rows, run.row_bytes), (0, 1), torch.uint8, head_axis=0)
        memory = blocks[:, start : start + block.num_bytes]
        heads, kind = (run.first, run.last), ((run.dtype, run.row_bytes),)
        yield f"{name}#{number}", CacheView(memory, block, view.group, heads, run.total, kind)
        start += block.num_bytes


def difference(prefill: Facts, decode: Facts) -> str | None:
    """The first thing that keeps `decode` from reading the blocks of `prefill`, with both values; None: nothing does.

    Ranks, block sizes, the order of a block's axes and how layers are grouped may differ.
    """
    if prefill.version != decode.version:
        return _differ("the version of the protocol", prefill.version, decode.version)
    theirs, ours = prefill.by_name, decode.by_name
    if len(theirs) != len(ours):
        return _differ("the number of layers that keep tokens", len(theirs), len(ours))
    if missing := [name for name in ours if name not in theirs]:
        return _differ("their layers", next(name for name in theirs if name not in ours), missing[0])
    for name, here in ours.items():
        there = theirs[name]
        one, other = prefill.blocks[there.block], decode.blocks[here.block]
        kept, keeps = prefill.groups[there.group], decode.groups[here.group]
        facts = (
            ("the element type of the KV cache (dtype or kv_cache_dtype)", one.dtype, other.dtype),
            ("how long tokens are kept", f"{kept.keeps} {kept.reach}", f"{keeps.keeps} {keeps.reach}"),
            ("the number of KV heads", there.total, here.total),
            ("the axes of a block, of its attention backend", _axes(one), _axes(other)),
        )
        for what, value, wanted in facts:
            if value != wanted:
                return _differ(f"{what}, of layer {name}", value, wanted)
        if kept.block_size != keeps.block_size and kept.keeps_states:
            sizes = kept.block_size, keeps.block_size
            return _differ(f"the tokens of which a state of layer {name} stands for a multiple (block_size)", *sizes)
        if kept.block_size != keeps.block_size and None in (one.token_axis, other.token_axis):
            sizes = kept.block_size, keeps.block_size
            return _differ(f"the block size, and the backend of layer {name} tells no axis of tokens", *sizes)
        if max(kept.block_size, keeps.block_size) % min(kept.block_size, keeps.block_size):
            sizes = kept.block_size, keeps.block_size
            return _differ("the block size, and neither is a multiple of the other", *sizes)
    if prefill.model != decode.model:
        return _differ("the model (a hash of config.json, weights and dtype)", prefill.model[:12], decode.model[:12])
    if prefill.exact != decode.exact:
        return _differ(
            "what `deterministic` fixes (model and how it is divided over devices)",
            prefill.exact[:12] or "nothing",
            decode.exact[:12] or "nothing",
        )
    return None


def _axes(block: BlockShape) -> str:
    """The lengths of axes, without those that may differ."""
    names = {block.token_axis: "tokens", block.head_axis: "heads"}
    return "x".join(names.get(axis, str(size)) for axis, size in enumerate(block.shape))


def _differ(what: str, prefill: Any, decode: Any) -> str:
    return f"{what}: {prefill} at the prefill engine, {decode} at the decode engine"
